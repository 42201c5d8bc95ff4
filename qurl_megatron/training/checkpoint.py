"""The training state on disk: Megatron's own distributed checkpoint, made atomic.

Model, optimizer and random state are sharded over the ranks and load into any parallel layout. What
the loop itself must remember is the small ``TrainState`` beside them. A critic lies beside the
policy, all of its names prefixed, so that who reads the checkpoint as a model does not see it.

On a GPU neither saving nor loading needs memory to speak of, so both go on while engines hold the
rest of it: tensors go to and from the files one at a time, from and to where they lie (``boxes``).
"""

import queue
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch.distributed.checkpoint.api import CheckpointException

from qurl_megatron.errors import ConfigError
from qurl_megatron.model.critic import Critic
from qurl_megatron.model.policy import Policy
from qurl_megatron.model.trained import Trained
from qurl_megatron.training.boxes import in_place
from qurl_megatron.training.state import TrainState, checkpoints
from qurl_megatron.weights.checkpoint import DESCRIPTION, describe
from qurl_megatron.weights.megatron_reader import CRITIC


def save(
    run_dir: Path, policy: Policy, state: TrainState, *, keep: int, critic: Critic | None = None
) -> Path:
    """Write the state between two steps; all ranks call it together.

    The folder is written aside and renamed by rank 0 when every rank has finished, so a checkpoint
    is whole or not there. Older ones beyond ``keep`` are deleted afterwards.
    """
    root = run_dir / "checkpoints"
    name = f"step_{state.step:06d}"
    final, aside = root / name, root / f".{name}"
    if policy.ranks.leads:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    strategy = FullyParallelSaveStrategyWrapper(
        _OneTensorAtATime("torch_dist", 1), policy.ranks.copies.group
    )
    metadata = _metadata(policy)
    dist_checkpointing.save(
        _sharded_state(policy, critic, loading=False),
        str(aside),
        strategy,
        content_metadata={k: v for k, v in metadata.items() if k != "dp_cp_group"},
    )
    dist.barrier()
    if policy.ranks.leads:
        # A checkpoint that says what it is: the converters need no other folder.
        config = policy.source.folded_config(policy.uaq_scale)
        describe(policy.source, aside / DESCRIPTION, config)
        state.write(aside)
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        for old in checkpoints(run_dir)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def load(checkpoint: Path, policy: Policy, critic: Critic | None = None) -> None:
    """Restore models, optimizers, schedules and random state; all ranks call it together.

    Raises:
        ConfigError: the checkpoint is of another model, has a critic or lacks one, or is damaged.
    """
    try:
        _check_critic(checkpoint, critic)
        strategy = FullyParallelLoadStrategyWrapper(
            get_default_load_sharded_strategy(str(checkpoint)), policy.ranks.copies.group
        )
        loaded = dist_checkpointing.load(
            _sharded_state(policy, critic, loading=True), str(checkpoint), strategy
        )
    except (CheckpointException, CheckpointingException) as error:
        raise ConfigError(
            f"checkpoint {checkpoint} cannot be loaded into this model ({_reason(error)}); use "
            "another train.run_dir, or the recipe the run was started with"
        ) from error
    _restore(policy, loaded)
    if critic is not None:
        _restore(critic, loaded["critic"])
    torch.set_rng_state(loaded["rng"]["cpu"])
    if torch.cuda.is_available() and loaded["rng"]["cuda"] is not None:
        torch.cuda.set_rng_state(loaded["rng"]["cuda"])


def _check_critic(checkpoint: Path, critic: Critic | None) -> None:
    """Raise ``ConfigError`` unless checkpoint and run agree on whether there is a critic."""
    saved = "critic" in dist_checkpointing.load_common_state_dict(str(checkpoint))
    if saved != (critic is not None):
        has, needs = ("a", "none") if saved else ("no", "one")
        raise ConfigError(
            f"checkpoint {checkpoint} has {has} critic, and algo.advantage needs {needs}; use the "
            "algo.advantage the run was started with, or another train.run_dir"
        )


def _sharded_state(policy: Policy, critic: Critic | None, *, loading: bool) -> dict[str, Any]:
    rng = {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    state = _sharded(policy, loading=loading)
    if critic is not None:
        state["critic"] = _sharded(critic, loading=loading)
        add_prefix_for_sharding(state["critic"], CRITIC)
    # No part of the models draws random numbers in training, so one state serves any layout.
    state["rng"] = ShardedObject("rng", rng, (1,), (0,), replica_id=policy.ranks.rank)
    return state


def _sharded(trained: Trained, *, loading: bool) -> dict[str, Any]:
    """Model, optimizer and schedule."""
    metadata = _metadata(trained)
    in_place(trained.optimizer)
    model = trained.gpt.sharded_state_dict(metadata=metadata)
    if loading:
        model = {name: value for name, value in model.items() if not _is_fp8_state(name)}
    return {
        "model": model,
        "optimizer": trained.optimizer.sharded_state_dict(
            model, is_loading=loading, metadata=metadata
        ),
        "scheduler": trained.scheduler.state_dict(),
    }


def _is_fp8_state(name: str) -> bool:
    """What Transformer Engine keeps beside weights in FP8: here nothing, in a checkpoint or not.

    It is saved, since Megatron's own tools ask for it. But layers of a machine without it write
    none for norms, and a run goes on from a CPU to GPUs.
    """
    return name.endswith("_extra_state")


def _restore(trained: Trained, loaded: dict[str, Any]) -> None:
    nothing = torch.empty(0, dtype=torch.uint8)
    fp8 = {name: nothing for name in trained.gpt.state_dict() if _is_fp8_state(name)}
    trained.gpt.load_state_dict({**loaded["model"], **fp8})
    trained.optimizer.load_state_dict(loaded["optimizer"])
    _unshare_adam_step(trained.optimizer)
    trained.scheduler.load_state_dict(loaded["scheduler"])


def _metadata(trained: Trained) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": trained.ranks.copies.group,
    }


def _reason(error: BaseException) -> str:
    """One line for a person; torch wraps what went wrong on each rank."""
    for failure, _ in getattr(error, "failures", {}).values():
        error = failure
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _adams(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """torch's own AdamW instances, which Megatron uses where TE and apex bring no fused one."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            yield part.optimizer


def _unshare_adam_step(optimizer: Any) -> None:
    """Give every state its own ``step``: Megatron loads one tensor into all of them.

    Each parameter's update would advance it for all, and the bias correction would be wrong
    without any error.
    """
    for adam in _adams(optimizer):
        for state in adam.state.values():
            state["step"] = state["step"].clone()


class _OneTensorAtATime(TorchDistSaveShardedStrategy):
    """Megatron's own writer, without copying all that a rank saves into host memory first."""

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> AsyncRequest:
        # Megatron would start a process that serves such a queue to writers in other processes.
        filesystem_async._results_queue = queue.Queue()
        request = super().async_save(sharded_state_dict, checkpoint_dir)
        if request.async_fn is None:  # nothing to write on this rank
            return request
        transforms, *_ = request.async_fn.args
        return request._replace(
            async_fn=_write, async_fn_args=(transforms, *request.async_fn_args), preload_fn=None
        )


def _write(transforms: list, _rank: int, files: list, written: Any) -> None:
    """Write this rank's files, and leave Megatron what it will look for in ``written``."""
    results: dict[int, list] = {}
    for index, (path, name, (objects, tensors)) in enumerate(files):
        # Megatron writes in processes of its own, which these two queues go to and fro.
        outcome, busy = queue.Queue(), queue.Queue()
        busy.put(index)
        staged = ((item, tensor.cpu()) for item, tensor in tensors)
        FileSystemWriterAsync.write_preloaded_data(
            transforms, index, (path, name, (objects, staged)), outcome, busy, use_fsync=True
        )
        _, results[index] = outcome.get()
        if isinstance(results[index], Exception):
            return written.put(results[index])
    written.put(results)
