"""One test body on several ranks: gloo processes on a CPU, nccl processes on the GPUs."""

import contextlib
import faulthandler
import importlib.util
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

BACKENDS = ["gloo"] + (["nccl"] if torch.cuda.device_count() >= 2 else [])

# Imported once by the server that forks the ranks; importing Megatron anew takes 6 s a rank.
PRELOAD = ("torch.distributed", "megatron.core")


def run_on_ranks(
    body: Callable[..., None],
    world_size: int,
    backend: str,
    tmp_path: Path,
    *args: object,
    timeout_s: float = 120.0,
) -> None:
    """Call ``body(device, *args)`` on every rank of a fresh world; a failing rank fails the test.

    Args:
        body: a function at the top of an importable module; the ranks find it by name.
        backend: one of ``BACKENDS``.
        tmp_path: any folder; the ranks meet in a file in it, so parallel test runs cannot collide.
        args: anything that can be pickled. Every rank gets its own copy.
        timeout_s: after this, ranks that still run are killed and the test fails.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=tmp_path))
    # Pickled here, because multiprocessing would put tensors into memory that the ranks share.
    call = pickle.dumps((body, args))
    world = mp.start_processes(
        _run_rank,
        (world_size, backend, folder, call, timeout_s),
        nprocs=world_size,
        join=False,
        start_method=_start_method(backend),
    )
    deadline = time.monotonic() + timeout_s
    try:
        while not world.join(timeout=max(deadline - time.monotonic(), 0.01)):
            if time.monotonic() > deadline:
                running = [rank for rank, p in enumerate(world.processes) if p.is_alive()]
                stacks = "\n".join((folder / f"stack-{rank}").read_text() for rank in running)
                raise TimeoutError(
                    f"ranks {running} of {world_size} ran over {timeout_s:g} s\n{stacks}"
                )
    except mp.ProcessRaisedException as error:
        # Torch reports the lowest failing rank, which may only have lost its peer; the file has
        # the cause.
        raise RankError((folder / "failure").read_text()) from error
    finally:
        for process in world.processes:
            if process.is_alive():
                process.kill()
                process.join()


class RankError(Exception):
    """The traceback of the first rank that failed."""


def _start_method(backend: str) -> str:
    """forkserver for gloo: fork hangs once the parent has used autograd, spawn imports torch anew
    on every rank. CUDA does not survive a fork of any kind that touched it, so nccl spawns."""
    if backend != "gloo":
        return "spawn"
    # Names are looked up without importing: the parent may have no use for them.
    found = [name for name in PRELOAD if importlib.util.find_spec(name.partition(".")[0])]
    mp.get_context("forkserver").set_forkserver_preload(found)
    return "forkserver"


def _run_rank(
    rank: int, world_size: int, backend: str, folder: Path, call: bytes, timeout_s: float
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)  # several ranks share the cores, and sums stay reproducible
    # Otherwise gloo looks up this machine's host name, which a container may be unable to resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with open(folder / f"stack-{rank}", "w") as stack:
        faulthandler.dump_traceback_later(0.9 * timeout_s, file=stack)
        try:
            _run_body(rank, world_size, backend, folder, call)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _run_body(rank: int, world_size: int, backend: str, folder: Path, call: bytes) -> None:
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    meeting = f"file://{folder / 'rendezvous'}"
    try:
        body, args = pickle.loads(call)
        dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world_size)
        body(device, *args)
    except BaseException:
        # Before this rank hangs up on its peers: what they report then is a consequence.
        with contextlib.suppress(FileExistsError), open(folder / "failure", "x") as file:
            file.write(f"rank {rank} of {world_size}:\n{traceback.format_exc()}")
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
