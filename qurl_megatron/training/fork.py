"""``qurl train --fork``: a new run folder that begins with another run's newest checkpoint.

Weights, optimizer, schedule and random state go along; so do metrics and timeline, which then tell
of the fork. It evaluates before its first step, as a run that begins does. The files of a
checkpoint are linked where both folders are on one file system: nobody writes into them once they
are whole.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path

from qurl_megatron.checkpoints.integrity import RECORD, read_record, to_disk, write_record
from qurl_megatron.config import RunConfig, changes, refused
from qurl_megatron.data.rows import changed_files
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import refusing
from qurl_megatron.observe.samples import SAMPLES_FILE
from qurl_megatron.observe.timeline import Timeline
from qurl_megatron.training.state import STATE, TrainState, claim, latest, recipe_of

ORDER = ("data.", "train.seed")  # keys that determine which prompt comes when ...
NOT_ORDER = ("data.prompts_per_step",)  # ... and one that only sets how many


def fork(source: Path, config: RunConfig) -> None:
    """Make ``train.run_dir`` a fork of ``source``, unless it has a checkpoint already.

    Raises:
        ConfigError: there is no checkpoint to begin with, or it forbids one of the changes.
    """
    run_dir = Path(config.train.run_dir)
    if latest(run_dir) is not None:
        print(f"{run_dir} has a checkpoint already, and goes on from it", flush=True)
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
    state = TrainState.read(newest)
    if state.step >= config.train.steps:
        raise ConfigError(
            f"--fork: {source} has done {state.step} steps, and train.steps={config.train.steps} "
            "leaves none to do; set train.steps higher"
        )
    files = changed_files(config.data, (state.cursor or {}).get("files", {}))
    keys = {change.key for change in setting_changes}
    begins = state_of_fork(state, keys, files, evaluates=config.train.eval_prompts > 0)
    changed = [*map(str, setting_changes), *(f"other data in {file}" for file in files.values())]
    how = "unchanged"
    if changed:
        how = f"with {', '.join(changed)}"
    origin = f"goes on from step {state.step} of {source.resolve()}, {how}"
    with claim(run_dir, config), refusing(run_dir, key="--fork"):
        _copy_logs(source, run_dir, state.step, origin)
        _copy_checkpoint(newest, run_dir / "checkpoints", begins)
    print(f"{run_dir} {origin}", flush=True)


def state_of_fork(
    state: TrainState, keys: set[str], files: dict[str, str], *, evaluates: bool
) -> TrainState:
    """Return the part of the other run's state that the fork begins with.

    Args:
        keys: settings that differ.
        files: data files that have changed since the run read them, by their keys.
        evaluates: the fork is to evaluate before its first step.
    """
    own_code = {key: checksum for key, checksum in state.own_code.items() if key not in keys}
    state = replace(state, guard={}, own_code=own_code, begun=state.step, unevaluated=evaluates)
    other_order = [key for key in keys if key.startswith(ORDER) and key not in NOT_ORDER]
    if other_order or files:
        state = replace(state, cursor=None)
    return state.without_scores()  # the outcome of the fork's own evaluation is its "before"


def _copy_logs(source: Path, run_dir: Path, step: int, origin: str) -> None:
    """Copy metrics, timeline and samples, and add the fork as an event.

    Entries of later steps are dropped when the run begins, as in any run that goes on.
    """
    for name in ("metrics.jsonl", "timeline.jsonl", SAMPLES_FILE):
        if (source / name).is_file():
            shutil.copyfile(source / name, run_dir / name)
    timeline = Timeline(run_dir / "timeline.jsonl", resume_step=step + 1)
    timeline.event("run", f"fork: {origin}", step)
    timeline.close()


def _copy_checkpoint(newest: Path, root: Path, state: TrainState) -> None:
    """Copy a checkpoint with another state, whole or not at all."""
    scratch = root / f".{newest.name}"
    shutil.rmtree(scratch, ignore_errors=True)
    record = read_record(newest)
    ignored = shutil.ignore_patterns(STATE, RECORD)
    shutil.copytree(newest, scratch, ignore=ignored, copy_function=_link)
    state.write(scratch)
    if record is not None:
        record.pop(STATE)
        write_record(scratch, record)
    scratch.rename(root / newest.name)
    to_disk(root)


def _link(source: str, to: str) -> None:
    try:
        os.link(source, to)
    except FileNotFoundError:  # the run is at work, and keeps no more than checkpoint.keep
        raise ConfigError(
            f"--fork: {source} went away while it was copied, as its run is at work; give the same "
            "command again"
        ) from None
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, to)
        to_disk(Path(to))
