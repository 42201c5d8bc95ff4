"""``qurl train --fork``: a new run folder that begins with another run's newest checkpoint.

    new_run_dir/fork.json   {"source": "/runs/old", "step": 40, "changes": ["data.path a -> b"]}

Weights, optimizer, schedule and random state go along; so do metrics and timeline, which then tell
of the fork. It evaluates before its first step, as a run that begins does. The files of a
checkpoint are linked where both folders are on one file system: nobody writes into them once they
are whole.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from qurl_megatron.checkpoints.integrity import RECORD, read_record, to_disk, write_record
from qurl_megatron.config import Change, RunConfig, changes, refused
from qurl_megatron.data.rows import changed_files
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import refusing
from qurl_megatron.observe.samples import SAMPLES_FILE
from qurl_megatron.observe.timeline import Timeline
from qurl_megatron.rewards.own_code import edited, named_code
from qurl_megatron.training.state import (
    REFERENCE,
    STATE,
    TrainState,
    after,
    claim,
    latest,
    recipe_of,
    setting_of,
    without_scores,
)

FORK = "fork.json"
ORDER = ("data.", "train.seed")  # keys that determine which prompt comes when ...
NOT_ORDER = ("data.prompts_per_step",)  # ... and one that only sets how many
REFERENCE_KEYS = ("algo.reference", "algo.reference_every", "model.path")
UPDATES = ("algo.epochs", "algo.minibatches", "algo.advantage", "critic.ahead_steps")  # of a step


@dataclass(frozen=True)
class Fork:
    """Where a run comes from."""

    source: str  # folder of the other run
    step: int  # of its checkpoint
    changes: tuple[str, ...]


def fork(source: Path, config: RunConfig) -> None:
    """Make ``train.run_dir`` a fork of ``source``; nothing is done where it is one already.

    Raises:
        ConfigError: there is nothing to begin with, the folder is another run's, or a change is
            one that the checkpoint does not allow.
    """
    run_dir = Path(config.train.run_dir)
    if latest(run_dir) is not None:
        _refuse_another(run_dir, source)
        print(f"{run_dir} is a fork of {source} already, and goes on", flush=True)
        return
    newest = latest(source)
    if newest is None:
        raise ConfigError(
            f"--fork: {source} has no checkpoint to begin with; set train.run_dir to the folder of "
            "the run to fork, or leave --fork out"
        )
    setting_changes = changes(recipe_of(source), config)
    if never := refused(setting_changes, fork=True):
        raise ConfigError(
            f"--fork: the checkpoints of {source} are of other settings, which are part of what is "
            f"in them ({', '.join(map(str, never))}); set these back, or begin again with the "
            f"weights alone: model.path={source}, a new train.run_dir, and no --fork"
        )
    _refuse_another_pace(config, setting_changes)
    state = TrainState.read(newest)
    state = replace(state, begun=state.step, unevaluated=config.train.eval_prompts > 0)
    files = changed_files(config.data, (state.cursor or {}).get("files", {}))
    if files:
        state = replace(after(files, state), cursor=None)
    if state.step >= config.train.steps:
        raise ConfigError(
            f"--fork: {source} has done {state.step} steps, and train.steps={config.train.steps} "
            "leaves none to do; set train.steps higher"
        )
    with claim(run_dir, config), refusing(run_dir, key="--fork"):
        begins = forked(state, setting_changes)
        named = named_code(config.reward, config.rollout, config.algo.function)
        code = edited(named, begins.own_code)
        changed = [f"other data in {file}" for file in files.values()]
        changed += [f"edited code of {setting}" for setting in code.values()]
        new_fork = Fork(str(source.resolve()), state.step, (*map(str, setting_changes), *changed))
        _copy_logs(source, run_dir, new_fork)
        (run_dir / FORK).write_text(json.dumps(asdict(new_fork), indent=1) + "\n", encoding="utf-8")
        without = None
        if any(change.key in REFERENCE_KEYS for change in setting_changes):
            without = REFERENCE
        _copy_checkpoint(newest, run_dir / "checkpoints", begins, without)
    print(f"{run_dir} {summary(new_fork)}", flush=True)


def forked(state: TrainState, setting_changes: Sequence[Change]) -> TrainState:
    """Return the part of the other run's state that the fork begins with.

    Args:
        state: ``unevaluated`` where the fork is to evaluate before its first step.
    """
    keys = {change.key for change in setting_changes}
    own_code = {}
    for key, checksum in state.own_code.items():
        if setting_of(key) not in keys:
            own_code[key] = checksum
    state = replace(after(keys, state), guard={}, own_code=own_code)
    for key in keys:
        if key.startswith(ORDER) and key not in NOT_ORDER:
            state = replace(state, cursor=None)
        if key.startswith("quant."):
            state = replace(state, unquantized_since=None, notice="")
    if state.unevaluated:  # its outcome is the fork's own "before"
        state = without_scores(state)
    return state


def summary(new_fork: Fork) -> str:
    """Return a sentence on the fork: its source and its changes."""
    changed = f"with {', '.join(new_fork.changes)}" if new_fork.changes else "unchanged"
    return f"goes on from step {new_fork.step} of {new_fork.source}, {changed}"


def _refuse_another_pace(config: RunConfig, setting_changes: Sequence[Change]) -> None:
    """Raise ``ConfigError`` where a schedule would count the updates done as others."""
    paced = [change.key for change in setting_changes if change.key in UPDATES]
    optimizer = config.optimizer
    if paced and optimizer.schedule != "constant" and not optimizer.decay_steps:
        raise ConfigError(
            f"--fork: {paced[0]} changes how many updates a step has, and the schedule counts "
            "those that were done; set optimizer.decay_steps to the update at which it is to end"
        )


def _refuse_another(run_dir: Path, source: Path) -> None:
    """Raise ``ConfigError`` unless the folder is a fork of ``source``."""
    record = run_dir / FORK
    try:
        origin = json.loads(record.read_text(encoding="utf-8"))["source"]
    except (OSError, ValueError, KeyError, TypeError):
        origin = None
    if origin != str(source.resolve()):
        raise ConfigError(
            f"--fork: {run_dir} holds a run that is not a fork of {source}; name a new folder"
        )


def _copy_logs(source: Path, run_dir: Path, begun: Fork) -> None:
    """Copy metrics, timeline and samples, and add the fork as an event.

    Entries of later steps are dropped when the run begins, as in any run that goes on.
    """
    for name in ("metrics.jsonl", "timeline.jsonl", SAMPLES_FILE):
        if (source / name).is_file():
            shutil.copyfile(source / name, run_dir / name)
    timeline = Timeline(run_dir / "timeline.jsonl", resume_step=begun.step + 1)
    timeline.event("run", f"fork: {summary(begun)}", begun.step)
    timeline.close()


def _copy_checkpoint(newest: Path, root: Path, state: TrainState, without: str | None) -> None:
    """Copy a checkpoint with another state, whole or not at all.

    Args:
        without: folder in it that is left out.
    """
    aside = root / f".{newest.name}"
    shutil.rmtree(aside, ignore_errors=True)
    record = read_record(newest)
    for path in sorted(newest.rglob("*")):
        name = path.relative_to(newest)
        if path.is_file() and name.as_posix() not in (STATE, RECORD) and name.parts[0] != without:
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            _link(path, aside / name)
    state.write(aside)
    if record is not None:
        copied = {}
        for file, file_sum in record.items():
            if file != STATE and Path(file).parts[0] != without:
                copied[file] = file_sum
        write_record(aside, copied)
    aside.rename(root / newest.name)
    to_disk(root)


def _link(path: Path, to: Path) -> None:
    try:
        os.link(path, to)
    except FileNotFoundError:  # the run is at work, and keeps no more than checkpoint.keep
        raise ConfigError(
            f"--fork: {path.parent} went away while it was copied, as its run is at work; give the "
            "same command again"
        ) from None
    except OSError:  # another file system, or one without links
        shutil.copyfile(path, to)
        to_disk(to)
