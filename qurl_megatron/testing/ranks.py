"""One test body on several ranks: gloo processes on a CPU, nccl processes on the GPUs of this machine."""

import importlib.util
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

BACKENDS = ["gloo"] + (["nccl"] if torch.cuda.device_count() >= 2 else [])

# Imported once by the server that forks the ranks; importing Megatron anew takes 6 s a rank.
PRELOAD = ("torch.distributed", "torch._dynamo", "megatron.core")


def run_on_ranks(
    body: Callable[..., None],
    world_size: int,
    backend: str,
    tmp_path: Path,
    *args: object,
    timeout_s: float = 120.0,
) -> None:
    """Call ``body(device, *args)`` on every rank of a fresh world; the first failing rank fails the test.

    Args:
        body: a function at the top of an importable module; the ranks find it by name.
        backend: one of ``BACKENDS``.
        tmp_path: any folder; the ranks meet in a file in it, so parallel test runs cannot collide.
        args: anything that can be pickled. Every rank gets its own copy.
        timeout_s: after this, ranks that still run are killed and the test fails.
    """
    meeting = Path(tempfile.mkdtemp(prefix="ranks-", dir=tmp_path)) / "rendezvous"
    # Pickled here, because multiprocessing would put tensors into memory that the ranks share.
    call = pickle.dumps((body, args))
    world = mp.start_processes(
        _run_rank,
        (world_size, backend, str(meeting), call),
        nprocs=world_size,
        join=False,
        start_method=_start_method(backend),
    )
    deadline = time.monotonic() + timeout_s
    while not world.join(timeout=max(deadline - time.monotonic(), 0.01)):
        if time.monotonic() > deadline:
            running = [rank for rank, process in enumerate(world.processes) if process.is_alive()]
            for process in world.processes:
                process.kill()
                process.join()
            raise TimeoutError(f"ranks {running} of {world_size} still ran after {timeout_s:g} s")


def _start_method(backend: str) -> str:
    """forkserver for gloo: fork hangs once the parent has used autograd, spawn imports torch anew
    on every rank. CUDA does not survive a fork of any kind that touched it, so nccl spawns."""
    if backend != "gloo":
        return "spawn"
    # Names are looked up without importing: the parent may have no use for them.
    found = [name for name in PRELOAD if importlib.util.find_spec(name.partition(".")[0])]
    mp.get_context("forkserver").set_forkserver_preload(found)
    return "forkserver"


def _run_rank(rank: int, world_size: int, backend: str, meeting: str, call: bytes) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)  # several ranks share the cores, and sums stay reproducible
    # Without it gloo looks up this machine's host name, which in a container may resolve to nothing.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    body, args = pickle.loads(call)
    dist.init_process_group(
        backend, init_method=f"file://{meeting}", rank=rank, world_size=world_size
    )
    try:
        body(device, *args)
    finally:
        dist.destroy_process_group()
