"""The only door to Megatron's process-wide state: enter, train, leave.

Megatron keeps its process groups in module globals. Everything above this module receives a
``Ranks`` with the groups it needs, so that pure code can take a group as an argument.
"""

import contextlib
import gc
import logging
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from qurl_megatron.actor import cpu
from qurl_megatron.config import ParallelConfig
from qurl_megatron.kit.errors import ConfigError, Foreseen

T = TypeVar("T")

WAIT = timedelta(hours=2)
"""How long a rank waits for another before it gives up on it; rollouts take longest. NCCL's too."""

UNHELPFUL = (
    "rerun_state_machine",  # of its own creation, in every process
    "models.gpt.gpt_model",  # 0.19: the class is deprecated
    "distributed.distributed_data_parallel",  # 0.19: it works a layout out by itself
    "dist_checkpointing.strategies.torch",  # 0.19: a plain save goes by way of a deprecated one
)
"""Parts of Megatron-Core whose warnings leave the user of a run nothing to do."""


class RankLost(Exception):
    """Another rank is gone, or has kept this one waiting for too long."""


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
    expert: Axis  # ranks of a stage with other experts
    expert_tensor: Axis  # ranks with other parts of the same experts
    expert_copies: Axis  # ranks with the same parts of the same experts

    @property
    def first_stage(self) -> bool:
        return self.pipeline.rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    def splits(self, parameter: nn.Parameter) -> Axis:
        """Return the ranks that hold different parts of a Megatron parameter."""
        return self.tensor if _is_everywhere(parameter) else self.expert_tensor

    def copies_of(self, parameter: nn.Parameter) -> Axis:
        """Return the ranks that hold the same part, and share its optimizer's state."""
        return self.copies if _is_everywhere(parameter) else self.expert_copies

    @property
    def counted(self) -> bool:
        """True on one of the ranks that see the same samples, so that sums count them once."""
        return self.tensor.rank == 0 and self.context.rank == 0

    @property
    def leads(self) -> bool:
        """True on the one process that talks to engines, files and the terminal."""
        return self.rank == 0


def _is_everywhere(parameter: nn.Parameter) -> bool:
    """Return False for experts that not every rank of a stage has: Megatron marks them so."""
    return getattr(parameter, "allreduce", True)


@contextlib.contextmanager
def megatron_runtime(config: ParallelConfig, *, seed: int = 0) -> Iterator[Ranks]:
    """Initialise torch.distributed and Megatron's groups from the environment torchrun or srun set.

    Args:
        config: its sizes multiply to the number of processes.

    Yields:
        This process' place. On leaving, groups are destroyed and the process can start afresh.

    Raises:
        ConfigError: the processes cannot meet, or two of them have one GPU.
    """
    started_here = not dist.is_initialized()
    device = _device()
    if device.type == "cpu":
        cpu.install()
    for part in UNHELPFUL:
        logging.getLogger(f"megatron.core.{part}").setLevel(logging.ERROR)
    from megatron.core import parallel_state, tensor_parallel

    if started_here:
        _meet(device)
        _refuse_shared_gpus(device)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        context_parallel_size=config.context,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=config.expert_tensor,
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
        expert=axis_of(parallel_state.get_expert_model_parallel_group()),
        expert_tensor=axis_of(parallel_state.get_expert_tensor_parallel_group()),
        expert_copies=axis_of(parallel_state.get_expert_data_parallel_group()),
    )
    # Only after success: where this rank failed, the others may be in a collective, and the process
    # that tears its groups down would wait for them instead of naming the failure.
    parallel_state.destroy_model_parallel()
    if started_here:
        dist.destroy_process_group()


def _meet(device: torch.device) -> None:
    """Join the other ranks; raises ``ConfigError`` where rank 0 cannot listen for them."""
    os.environ.setdefault("MASTER_PORT", "29500")  # for ranks started by hand
    try:
        dist.init_process_group(_backend(device), timeout=WAIT)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"port {os.environ['MASTER_PORT']}, where the ranks are to meet, is taken on "
            f"{socket.gethostname()}; set MASTER_PORT to another one"
        ) from None


def axis_of(group: dist.ProcessGroup) -> Axis:
    return Axis(group, dist.get_rank(group), dist.get_world_size(group))


def share(value: Any, *, waiting_for: str) -> Any:
    """Return the leading rank's value on every rank; those wait on the CPU.

    Args:
        waiting_for: task of the leading rank, for the error message.

    Raises:
        RankLost: it never came.
    """
    box = [value]
    try:
        dist.broadcast_object_list(box, src=0)
    except RuntimeError as error:  # gloo raises no more specific type
        rank, hours = dist.get_rank(), WAIT.total_seconds() / 3600
        if "timed out" in str(error).lower():
            reason = f"waited {hours:g} hours for rank 0 ({waiting_for}); look at its log"
        else:
            reason = f"lost contact with rank 0 or another rank during its part ({waiting_for})"
        raise RankLost(f"rank {rank} {reason}: {error}") from error
    return box[0]


def _outcome(act: Callable[[], T]) -> tuple[T | None, Foreseen | None]:
    """Return the result of ``act``, or the failure that the other ranks must hear of."""
    try:
        return act(), None
    except Foreseen as error:
        return None, error


def on_lead(act: Callable[[], T], ranks: Ranks, *, waiting_for: str) -> T:
    """Return on every rank the result of ``act``, which the leading rank alone calls.

    Args:
        act: its result is pickled.
        waiting_for: as for ``share``.

    Raises:
        Foreseen: ``act`` did, on every rank. Any other exception is raised there alone.
    """
    result, failure = share(_outcome(act) if ranks.leads else None, waiting_for=waiting_for)
    if failure is not None:
        raise failure
    return result


def kept_on_lead(act: Callable[[], T], ranks: Ranks, *, waiting_for: str) -> T | None:
    """Return the result of ``act`` on the leading rank, and None on the others."""
    results: list[T] = []
    on_lead(lambda: results.append(act()), ranks, waiting_for=waiting_for)
    return results[0] if results else None


def held(kept: T | None) -> T:
    """Return the object that ``kept_on_lead`` keeps on the leading rank."""
    assert kept is not None, "only the leading rank has it"
    return kept


def everywhere(own_value: Any) -> list:
    """Gather each rank's value on every rank."""
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, own_value)
    return values


def together(act: Callable[[], T]) -> list[T]:
    """Return every rank's result of ``act``, on every rank; all ranks call it.

    Raises:
        Foreseen: ``act`` did on one of them; raised on every rank.
    """
    outcomes = everywhere(_outcome(act))
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    return [result for result, _ in outcomes]


def release_memory() -> None:
    """Free the device memory that no tensor uses; no rank goes on before all have.

    Engines are sized by the memory they find free, and the leading rank starts those on all GPUs.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    dist.barrier()


def _backend(device: torch.device) -> str:
    """Return the backend of the default group, and so of every group of Megatron's.

    On GPUs it is two: NCCL for tensors there, gloo for everything else. Objects and
    barriers, ours as well as Megatron's, then meet over gloo, in any group; over NCCL a rank would
    wait for rollouts in a kernel that spins on the engines' GPU. No device is bound to the group:
    barriers would go there, and a communicator of all ranks would be made that nobody needs.
    """
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _device() -> torch.device:
    """Return this rank's GPU; the CPU if there is none, or if ranks that have met speak gloo alone.

    Too few GPUs are not this rank's to report: ``_refuse_shared_gpus`` does, once all have met.
    """
    over_nccl = not dist.is_initialized() or "nccl" in dist.get_backend_config()
    if not over_nccl or not torch.cuda.is_available():
        return torch.device("cpu")
    devices, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    # A launcher may show each rank a device of its own, which is then the only one.
    device = torch.device("cuda", min(local_rank, devices - 1))
    torch.cuda.set_device(device)
    return device


def _refuse_shared_gpus(device: torch.device) -> None:
    """Raise ``ConfigError`` where two ranks have one GPU; all ranks call it together.

    A rank that sees a single GPU cannot know by itself whether its neighbours see another.
    """
    if device.type != "cuda":
        return
    identities = everywhere(_identity(device))
    for rank, identity in enumerate(identities):
        first = identities.index(identity)
        if first != rank:
            raise ConfigError(
                f"ranks {first} and {rank} have the same GPU ({identity}); start at most one rank "
                "per GPU, and let the launcher show each rank all GPUs of its node or one of its "
                "own"
            )


def _identity(device: torch.device) -> str:
    """Return a name of a GPU, or of a part that MIG makes, unique among all nodes."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if device.index < len(visible) and visible[device.index].startswith("MIG-"):
        return visible[device.index]  # CUDA's own answer may name the whole GPU
    return str(torch.cuda.get_device_properties(device).uuid)
