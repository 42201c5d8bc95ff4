"""One process that stands for any rank of a run, with tensors that hold nothing.

Torch's fake process group answers every collective at once, so Megatron's groups can be made for
thousands of ranks in a process of their own; on the meta device a model of any size takes no
memory. What is built so is the real thing, cut for the real place: only its numbers are missing.
"""

import contextlib
import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from qurl_megatron.config import ParallelConfig
from qurl_megatron.runtime import cpu
from qurl_megatron.runtime.megatron import Ranks, megatron_runtime

META = torch.device("meta")
VISIBLE = "CUDA_VISIBLE_DEVICES"
Result = TypeVar("Result")


def without_gpus(function: Callable[..., Result], *args, **kwargs) -> Result:
    """Call ``function`` where torch sees no GPU: here, or in a process that waits for such calls.

    Args:
        function: one at the top of an importable module; what it takes and returns is pickled.
    """
    if not torch.cuda.is_available():
        return function(*args, **kwargs)
    return _process().submit(function, *args, **kwargs).result()


@functools.cache
def _process() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    shown = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = ""
    try:
        pool.submit(int)  # starts the process, which sees what is visible now
    finally:
        del os.environ[VISIBLE]
        os.environ |= {} if shown is None else {VISIBLE: shown}
    return pool


@contextlib.contextmanager
def pretended_rank(config: ParallelConfig, rank: int) -> Iterator[Ranks]:
    """Megatron's state as rank ``rank`` of a run of ``config.world_size`` ranks would find it.

    Inside, Megatron's "current device" is the meta device; models are to be built under
    ``torch.device("meta")`` as well, because layers on a CPU name no device at all. Needs a process
    in which torch sees no GPU and has no process group.
    """
    assert not torch.cuda.is_available(), "call it by without_gpus"
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
