"""One test body on several ranks: gloo processes on a CPU, nccl processes on the GPUs.

Ranks are forked from a server that has Megatron imported, one for each backend: that of gloo sees
no GPU, so that a body runs on the CPU wherever its test does.
"""

import contextlib
import faulthandler
import functools
import importlib.util
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from qurl_megatron.kit.launch import FORK_SERVER

BACKENDS = ["gloo"] + (["nccl"] if torch.cuda.device_count() else [])

# Imported once by the server that forks the ranks; importing Megatron again takes 6 s a rank. Ours
# comes first: it keeps from Megatron what only GPUs can run.
PRELOAD = ("torch.distributed", "qurl_megatron.actor", "qurl_megatron.training.train")

ENVIRONMENT = {
    "gloo": {"CUDA_VISIBLE_DEVICES": ""},
    "nccl": {
        # What is compared exactly is computed exactly: Transformer Engine's FP32 is TF32 otherwise.
        "NVIDIA_TF32_OVERRIDE": "0",
        # Without it torch asks the CUDA driver whether there is a GPU, which no fork survives.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    },
}
"""What ranks of a backend find in their environment, beside what the test has in its own."""

GROUPS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
"""The default group of each, as in a run: what is no tensor on a GPU goes over gloo."""


def run_on_ranks(
    body: Callable[..., None],
    world_size: int,
    backend: str,
    tmp_path: Path,
    *args: object,
    timeout_s: float = 120.0,
    preload: tuple[str, ...] | None = None,
) -> None:
    """Call ``body(device, *args)`` on every rank of a fresh world; a failing rank fails the test.

    A test that asks for more nccl ranks than there are GPUs is skipped.

    Args:
        body: a function at the top of an importable module; the ranks find it by name.
        backend: one of ``BACKENDS``.
        tmp_path: any folder; the ranks meet in a file in it, so parallel test runs cannot collide.
        args: anything that can be pickled. Every rank gets its own copy.
        timeout_s: after this, ranks that still run are killed and the test fails.
        preload: modules that the ranks have imported before ``body``; None for ``PRELOAD``.
    """
    gpus = torch.cuda.device_count()
    if backend == "nccl" and gpus < world_size:
        pytest.skip(f"{world_size} nccl ranks need {world_size} GPUs, and there are {gpus}")
    folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=tmp_path))
    # Pickled here, because multiprocessing would put tensors into memory that the ranks share.
    call = pickle.dumps((body, args))
    args = (world_size, backend, folder, call, timeout_s)
    # Importing Transformer Engine initialises CUDA, which a fork cannot use then.
    spawns = backend == "nccl" and importlib.util.find_spec("transformer_engine")
    method = "spawn" if spawns else "forkserver"
    with _server(backend, preload or PRELOAD):
        world = mp.start_processes(
            _run_rank, args, nprocs=world_size, join=False, start_method=method
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


@functools.cache
def _fork_server(backend: str, preload: tuple[str, ...]) -> forkserver.ForkServer:
    """forkserver, because fork hangs once the parent has used autograd, and spawn imports torch
    again on every rank."""
    made = forkserver.ForkServer()
    # Names are looked up without importing: the parent may have no use for them.
    found = [name for name in preload if importlib.util.find_spec(name.partition(".")[0])]
    made.set_forkserver_preload([FORK_SERVER, *found])
    return made


@contextlib.contextmanager
def _server(backend: str, preload: tuple[str, ...]) -> Iterator[None]:
    """Inside, processes that start are those of ``backend``.

    multiprocessing has one fork server for all, and a server's processes see the GPUs that it saw
    when it began.
    """
    connect = _fork_server(backend, preload).connect_to_new_process
    with (
        mock.patch.dict(os.environ, ENVIRONMENT[backend]),
        mock.patch.object(forkserver, "connect_to_new_process", connect),
    ):
        yield


def _run_rank(
    rank: int, world_size: int, backend: str, folder: Path, call: bytes, timeout_s: float
) -> None:
    # A forked rank has the environment its server began with, and the test may have changed it.
    os.environ |= {
        **ENVIRONMENT[backend],
        **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
        **{name: str(world_size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)  # several ranks share the cores, and sums stay reproducible
    # Otherwise gloo looks up this machine's host name, which a container may be unable to resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with open(folder / f"stack-{rank}", "w") as stack:
        # Well before the end: ranks may begin seconds after the time does.
        faulthandler.dump_traceback_later(0.5 * timeout_s, file=stack)
        try:
            _run_body(rank, world_size, backend, folder, call)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _run_body(rank: int, world_size: int, backend: str, folder: Path, call: bytes) -> None:
    meeting = f"file://{folder / 'rendezvous'}"
    try:
        device = torch.device("cpu")
        if backend == "nccl":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        body, args = pickle.loads(call)
        dist.init_process_group(
            GROUPS[backend], init_method=meeting, rank=rank, world_size=world_size
        )
        body(device, *args)
    except BaseException:
        # Before this rank hangs up on its peers: what they report then is a consequence.
        with contextlib.suppress(FileExistsError), open(folder / "failure", "x") as file:
            file.write(f"rank {rank} of {world_size}:\n{traceback.format_exc()}")
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_with_stand_in(
    body: Callable[..., None], world_size: int, backend: str, tmp_path: Path, *args
) -> None:
    """Call ``body`` on ranks whose Transformer Engine is the stand-in of the tests."""
    with_it = ("torch.distributed", "tests.support.transformer_engine.preloaded")
    run_on_ranks(with_stand_in, world_size, backend, tmp_path, body, *args, preload=with_it)


def with_stand_in(device, body: Callable[..., None], *args) -> None:
    from tests.support.transformer_engine import install

    install()
    body(device, *args)
