"""One process that stands for any rank of a run, with tensors that hold nothing.

Torch's fake process group answers every collective at once, so Megatron's groups can be made for
thousands of ranks in a process of their own; on the meta device a model of any size takes no
memory. Models built so are real, cut for their real place: only their numbers are missing.

That process sees no GPU: on a laptop and on a node full of them it finds the same.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from qurl_megatron.actor import cpu
from qurl_megatron.actor.megatron import Ranks, megatron_runtime
from qurl_megatron.config import ParallelConfig

T = TypeVar("T")

META = torch.device("meta")


def without_gpus(function: Callable[..., T], *args: object) -> T:
    """Return ``function(*args)``, called in a process that sees no GPU; one serves all calls.

    Args:
        function: at the top of an importable module, as its arguments' types are.
    """
    try:
        return _process().submit(function, *args).result()
    except BrokenProcessPool:  # it was killed: the next call starts another
        _process.cache_clear()
        raise


@functools.cache
def _process() -> ProcessPoolExecutor:
    # The caller may have started CUDA, or imported Megatron with a GPU in sight.
    pool = ProcessPoolExecutor(
        1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),  # Ctrl-C is for the caller
    )
    # Megatron warns of every optional package it does not find.
    settings = {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ |= settings
    try:
        pool.submit(os.getpid).result()  # starts it
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return pool


@contextlib.contextmanager
def pretended_rank(config: ParallelConfig, rank: int) -> Iterator[Ranks]:
    """Megatron's state as rank ``rank`` of a run of ``config.world_size`` ranks would find it.

    Inside, Megatron's "current device" is the meta device; models are to be built under
    ``torch.device("meta")`` as well, because layers on a CPU name no device at all. Needs a process
    in which torch sees no GPU and has no process group.
    """
    assert not torch.cuda.is_available(), "to be called by without_gpus"
    cpu.install()
    from megatron.core import parallel_state

    # Registers the backend; an internal module of torch, so it is met here alone.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.world_size)
    try:
        with megatron_runtime(config) as ranks, cpu.current_device(META):
            yield replace(ranks, device=META)
    finally:
        parallel_state.destroy_model_parallel()  # megatron_runtime leaves it after a failure
        dist.destroy_process_group()
