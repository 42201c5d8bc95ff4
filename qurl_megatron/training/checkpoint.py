"""The training state on disk: Megatron's own distributed checkpoint, made atomic.

Model, optimizer and random state are sharded over the ranks and load into any parallel layout. The
loop's own state is the small ``TrainState`` beside them. A critic lies beside the policy under
prefixed names, so that readers of the model do not see it. Every file's checksum is recorded, of
large ones while they are written, so that damage is found before a run resumes (``newest``).

Saving and loading need hardly any GPU memory, so both work while engines hold the rest: tensors go
to and from the files one at a time (``in_place``).
"""

import contextlib
import errno
import os
import pickle
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from qurl_megatron.actor.critic import Critic
from qurl_megatron.actor.megatron import everywhere, on_lead, together
from qurl_megatron.actor.policy import Policy
from qurl_megatron.actor.trained import Trained, torch_adam_states
from qurl_megatron.checkpoints.integrity import RECORD, FileSum, read_record, to_disk, write_record
from qurl_megatron.checkpoints.megatron_reader import CRITIC
from qurl_megatron.checkpoints.places import DESCRIPTION
from qurl_megatron.checkpoints.source import describe
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import free, refusal, refusing
from qurl_megatron.training.in_place import OneTensorAtATime, in_place
from qurl_megatron.training.state import STATE, TrainState, checkpoints, latest, set_aside


def save(
    run_dir: Path, policy: Policy, state: TrainState, *, keep: int, critic: Critic | None = None
) -> Path:
    """Write the state between two steps; all ranks call it together.

    The folder is written aside and renamed by rank 0 when every rank has finished, so a checkpoint
    is whole or not there. Older ones beyond ``keep`` are deleted afterwards.

    Raises:
        ConfigError: no room, or no right to write; on all ranks, and older checkpoints stay.
    """
    root = run_dir / "checkpoints"
    name = f"step_{state.step:06d}"
    final, scratch = root / name, root / f".{name}"
    sharded = _sharded_state(policy, critic, loading=False)
    size = _bytes_to_write(sharded)
    refused = partial(refusing, final, key="train.run_dir", size=size)
    ranks, sums = policy.ranks, dict[str, FileSum]()

    def make_room() -> None:
        with refused():
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            if size > free(scratch):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write() -> dict[str, FileSum]:
        with refused():
            return _write_sharded(sharded, scratch, policy)

    def finish() -> None:
        with refused():
            # The checkpoint describes itself: the converters need no other folder.
            config = policy.source.folded_config(policy.uaq_scale)
            describe(policy.source, scratch / DESCRIPTION, config)
            state.write(scratch)
            write_record(scratch, sums)
            if final.exists():  # nobody resumed from it: it is not whole
                set_aside(final)
            scratch.rename(final)
            to_disk(root)
        with contextlib.suppress(OSError):  # the next save tries again
            for old in checkpoints(run_dir)[:-keep]:
                shutil.rmtree(old)

    def give_up() -> str:
        shutil.rmtree(scratch, ignore_errors=True)
        if newest := latest(run_dir):
            return f"{newest.name} stays the newest checkpoint"
        return "there is no older one"

    try:
        on_lead(make_room, ranks, waiting_for="room for a checkpoint")
        for rank_sums in together(write):
            sums |= rank_sums
        on_lead(finish, ranks, waiting_for="the end of a checkpoint")
    except _RefusedOnLead as error:
        refusal_here = refusal(error.refused, final, key="train.run_dir", size=size)
        raise ConfigError(f"checkpoint {refusal_here}; older checkpoints stay") from error
    except ConfigError as error:
        remainder = on_lead(give_up, ranks, waiting_for="looking for older checkpoints")
        raise ConfigError(f"checkpoint {error}; {remainder}") from error
    return final


def add_evaluation(run_dir: Path, state: TrainState) -> None:
    """Add the evaluation's outcome to the checkpoint of a step that was saved without it.

    Raises:
        ConfigError: it cannot be written.
    """
    folder = run_dir / "checkpoints" / f"step_{state.step:06d}"
    with refusing(folder / STATE, key="train.run_dir"):
        record = read_record(folder)
        # A checkpoint without a record is not verified: one interrupted here still counts as whole.
        (folder / RECORD).unlink(missing_ok=True)
        state.write(folder)
        if record is not None:
            record.pop(STATE)
            write_record(folder, record)


class _RefusedOnLead(Exception):
    """Rank 0 alone could not write, in a collective in which the other ranks wait for it."""

    def __init__(self, refused: OSError) -> None:
        self.refused = refused


def _write_sharded(sharded: dict[str, Any], folder: Path, policy: Policy) -> dict[str, FileSum]:
    """Have Megatron write; return the sums of this rank's files.

    Raises:
        OSError: a rank could not write; raised on all ranks.
        _RefusedOnLead: rank 0 could not write, and the others do not know.
    """
    strategy = OneTensorAtATime("torch_dist", 1)
    try:
        dist_checkpointing.save(
            sharded,
            str(folder),
            FullyParallelSaveStrategyWrapper(strategy, policy.ranks.copies.group),
            content_metadata=_FORMAT,
        )
    except CheckpointException:  # on all ranks, one of which knows the system's reason
        for refused in filter(None, everywhere(_system_error(strategy.failure))):
            raise refused from None
        raise
    except (OSError, RuntimeError) as error:
        if refused := _system_error(error):
            raise _RefusedOnLead(refused) from error
        raise
    return strategy.sums


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the system's error behind torch's message of an unfinished archive, or None."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def load(checkpoint: Path, policy: Policy, critic: Critic | None = None) -> None:
    """Restore models, optimizers, schedules and random state; all ranks call it together.

    Raises:
        ConfigError: the checkpoint is of another model, has a critic that the run lacks or the
            reverse, or is damaged and has no record of checksums.
    """
    try:
        _check_critic(checkpoint, critic)
        strategy = FullyParallelLoadStrategyWrapper(
            get_default_load_sharded_strategy(str(checkpoint)), policy.ranks.copies.group
        )
        loaded = dist_checkpointing.load(
            _sharded_state(policy, critic, loading=True), str(checkpoint), strategy
        )
    except (CheckpointException, CheckpointingException, *_CUT_OFF) as error:
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


_FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""How Megatron lays out a checkpoint, which it also writes into it."""

_CUT_OFF = (EOFError, pickle.UnpicklingError, OSError)
"""Errors that torch and pickle raise for a truncated file, where Megatron reads it itself."""


def _bytes_to_write(sharded: dict[str, Any]) -> int:
    """Return the total bytes over all ranks, small files aside; every rank calls it."""
    own_bytes = 0
    for value in nested_values(sharded):
        is_tensor = isinstance(value, ShardedTensor | ShardedTensorFactory)
        if is_tensor and is_main_replica(value.replica_id):
            own_bytes += value.data.nbytes
    return sum(everywhere(own_bytes))


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
    rng: dict[str, Tensor | None] = {"cpu": torch.get_rng_state(), "cuda": None}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    state = _sharded(policy, loading=loading)
    if critic is not None:
        state["critic"] = _sharded(critic, loading=loading)
        add_prefix_for_sharding(state["critic"], CRITIC)
    # No part of the models draws random numbers in training, so one state serves any layout.
    state["rng"] = ShardedObject("rng", rng, (1,), (0,), replica_id=policy.ranks.rank)
    return state


def _sharded(trained: Trained, *, loading: bool) -> dict[str, Any]:
    """Return model, optimizer and schedule as Megatron saves them."""
    metadata = {**_FORMAT, "dp_cp_group": trained.ranks.copies.group}
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
    """Return whether a name is Transformer Engine's FP8 state, which is always empty here.

    Megatron's own tools expect it in a checkpoint. But without Transformer Engine norms write none,
    and a run may move from a CPU to GPUs.
    """
    return "_extra_state" in name  # of experts in one module with a number behind it


def _parameter_groups(state: Any) -> Iterator[dict[str, Any]]:
    """Yield the groups of every optimizer in ``state``, however they are chained."""
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if key == "param_groups":
            yield from value
        elif isinstance(value, dict):
            yield from _parameter_groups(value)


def _restore(trained: Trained, loaded: dict[str, Any]) -> None:
    nothing = torch.empty(0, dtype=torch.uint8)
    fp8 = {name: nothing for name in trained.gpt.state_dict() if _is_fp8_state(name)}
    trained.gpt.load_state_dict({**loaded["model"], **fp8})
    # Tensors were read into place. Otherwise only the step count is taken from the checkpoint:
    # groups follow the present recipe and layout (experts that not every rank has form groups of
    # their own).
    saved = [group for group in _parameter_groups(loaded["optimizer"]) if "step" in group]
    optimizer_state = trained.optimizer.state_dict()
    for group in _parameter_groups(optimizer_state):
        group.pop("step", None)
        if saved:  # a fused Adam has no count before its first step
            group["step"] = saved[0]["step"]
    trained.optimizer.load_state_dict(optimizer_state)
    # Megatron loads one step count into all states: each parameter's update would advance it for
    # all, and the bias correction would be wrong without any error.
    for adam_state in torch_adam_states(trained.optimizer):
        adam_state["step"] = adam_state["step"].clone()
    trained.scheduler.num_steps = 0  # the loaded count is added to it
    trained.scheduler.load_state_dict(loaded["scheduler"])
    trained.weights_changed()


def _reason(error: BaseException) -> str:
    """Return one line for a person; torch wraps the errors of the ranks."""
    for failure, _ in getattr(error, "failures", {}).values():
        error = failure
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
