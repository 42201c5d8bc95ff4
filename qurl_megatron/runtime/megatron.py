"""The only door to Megatron's process-wide state: enter, train, leave.

Megatron keeps its process groups in module globals. Everything above this module receives a
``Ranks`` with the groups it needs, so that pure code can take a group as an argument.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from qurl_megatron.config import ParallelConfig
from qurl_megatron.errors import ConfigError
from qurl_megatron.runtime import cpu


@dataclass(frozen=True)
class Axis:
    """One direction of parallelism, as this rank sees it."""

    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True)
class Ranks:
    """Where this process stands."""

    device: torch.device
    rank: int
    world_size: int
    tensor: Axis
    pipeline: Axis
    context: Axis
    data: Axis  # ranks with other samples
    copies: Axis  # data x context: ranks with the same weights, which share the optimizer's state

    @property
    def first_stage(self) -> bool:
        return self.pipeline.rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def counted(self) -> bool:
        """True on one of the ranks that see the same samples, so that sums count them once."""
        return self.tensor.rank == 0 and self.context.rank == 0

    @property
    def leads(self) -> bool:
        """True on the one process that talks to engines, files and the terminal."""
        return self.rank == 0


@contextlib.contextmanager
def megatron_runtime(config: ParallelConfig, *, seed: int = 0) -> Iterator[Ranks]:
    """Initialise torch.distributed and Megatron's groups from the environment torchrun or srun set.

    Yields:
        This process' place. On leaving, groups are destroyed and the process can start afresh.

    Raises:
        ConfigError: the number of processes is not the product of the parallel sizes.
    """
    started_here = not dist.is_initialized()
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if started_here else dist.get_world_size()
    if world_size != config.world_size:
        raise ConfigError(
            "parallel.tensor * parallel.pipeline * parallel.context * parallel.data = "
            f"{config.world_size}, but {world_size} processes were started; make them equal"
        )
    if started_here:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        os.environ.setdefault("RANK", "0")
        os.environ.setdefault("WORLD_SIZE", "1")
    cpu.install()
    # It reports its own creation as a warning, in every process.
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)
    from megatron.core import parallel_state, tensor_parallel

    device = _device()
    if started_here:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(hours=2))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        context_parallel_size=config.context,
        # A second, gloo set of groups helps only where the first is NCCL.
        create_gloo_process_groups=device.type == "cuda",
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    yield Ranks(
        device=device,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor=axis_of(parallel_state.get_tensor_model_parallel_group()),
        pipeline=axis_of(parallel_state.get_pipeline_model_parallel_group()),
        context=axis_of(parallel_state.get_context_parallel_group()),
        data=axis_of(parallel_state.get_data_parallel_group()),
        copies=axis_of(parallel_state.get_data_parallel_group(with_context_parallel=True)),
    )
    # Only after success: where this rank failed, the others may be in a collective, and the process
    # that tears its groups down would wait for them instead of saying what went wrong.
    parallel_state.destroy_model_parallel()
    if started_here:
        dist.destroy_process_group()


def axis_of(group: dist.ProcessGroup) -> Axis:
    return Axis(group, dist.get_rank(group), dist.get_world_size(group))


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # A launcher may show each rank a device of its own, which is then the only one.
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
