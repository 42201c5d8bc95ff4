"""The loop's state between two steps, beside the policy; readable without Megatron.

On disk:

    run_dir/checkpoints/step_000040/          a checkpoint: it was renamed into place last
    run_dir/checkpoints/.step_000040/         one the run died while writing; ignored, then replaced
    run_dir/checkpoints/step_000040.damaged/  one that was no longer whole; never touched again
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TextIO

import msgspec

from qurl_megatron.checkpoints.places import folders
from qurl_megatron.config import Change, RunConfig, changes, load, refused, to_toml
from qurl_megatron.data.rows import changed_files
from qurl_megatron.kit.disk import lock, write_whole
from qurl_megatron.kit.errors import ConfigError, Unreadable, reading
from qurl_megatron.kit.filesystem import refusing

STATE = "state.json"
RECIPE = "config.toml"
COMPARABLE_UNLESS = {"reward.failed", "train.eval_prompts", "train.eval_samples"}
"""Settings that may change under a run, and by which held-out scores are measured."""

Step = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class TrainState:
    """State between two steps; the leading rank saves its own with every checkpoint."""

    step: Step = 0  # updates done; also the weight version the engines hold
    cursor: dict[str, Any] | None = None  # where the prompts go on
    accuracy_before: float | None = None  # held-out score of the model of step ``begun``
    accuracy: float | None = None  # the newest held-out score
    accuracy_step: int | None = None  # of that score
    guard: dict[str, int] = field(default_factory=dict)  # steps in a row, by crossed threshold
    unevaluated: bool = False  # stopped while it evaluated this step, or a fork that is to do so
    own_code: dict[str, str] = field(default_factory=dict)  # checksums, by the key that names it
    begun: int = 0  # step of the model the run began with: another run's newest, where it is a fork

    @staticmethod
    def read(checkpoint: Path) -> "TrainState":
        """Read the state of a checkpoint.

        Raises:
            Unreadable: the system cannot read the file, or a newer version wrote it.
            ConfigError: the file is missing or damaged.
        """
        path = checkpoint / STATE
        try:
            with reading(path):
                values = json.loads(path.read_bytes())
            state = msgspec.convert(values, TrainState)
        except FileNotFoundError:
            raise ConfigError(f"{path} is missing") from None
        except (ValueError, RecursionError, msgspec.ValidationError) as error:
            raise ConfigError(f"{path} is damaged ({error!s:.200})") from None
        if unknown := sorted(values.keys() - {field.name for field in fields(TrainState)}):
            raise Unreadable(
                f"{path} has the keys {', '.join(unknown):.200}, which this version does not know; "
                "go on with the version that wrote them, or set train.run_dir to a new folder"
            )
        return state

    def write(self, checkpoint: Path) -> None:
        write_whole(checkpoint / STATE, json.dumps(asdict(self), indent=1), sync=True)

    def finished(self, steps: int) -> bool:
        """Return whether a run of so many steps has nothing left to do."""
        return self.step >= steps and not self.unevaluated

    def scored(self, score: float) -> "TrainState":
        """Return the state once its step is evaluated."""
        before = score if self.step == self.begun else self.accuracy_before
        return replace(
            self, accuracy=score, accuracy_step=self.step, accuracy_before=before, unevaluated=False
        )

    def without_scores(self) -> "TrainState":
        """Return the state of a run whose scores are measured otherwise from here on."""
        return replace(self, accuracy=None, accuracy_step=None, accuracy_before=None)

    def summary(self, *, right_or_wrong: bool) -> str:
        """Return a sentence on how far the run has come.

        Args:
            right_or_wrong: each held-out score is 1 or 0.
        """
        done, before, now = f"step {self.step} done", self.accuracy_before, self.accuracy
        if now is None:
            return done
        kind, shown = _wording(right_or_wrong=right_or_wrong)
        when = ""
        if self.accuracy_step not in (None, self.step):
            when = f" after step {self.accuracy_step}"
        if before is None:
            return f"{done}; held-out {kind} {now:{shown}}{when}"
        gain = f" ({100 * (now - before):+.1f} points)" if right_or_wrong else ""
        course = f"{before:{shown}} before, {now:{shown}}{when or ' after'}"
        return f"{done}; held-out {kind} {course}{gain}"


def _wording(*, right_or_wrong: bool) -> tuple[str, str]:
    """Return the name of a held-out score, and its format."""
    return ("accuracy", ".1%") if right_or_wrong else ("reward", ".3f")


def score_sentence(before: TrainState, score: float, *, right_or_wrong: bool) -> str:
    """Return a sentence on an evaluation's score, and the change since the one before.

    Args:
        before: the state at the evaluated step, without the score.
    """
    kind, shown = _wording(right_or_wrong=right_or_wrong)
    sentence = f"step {before.step}: held-out {kind} {score:{shown}}"
    if before.accuracy is None:
        return sentence
    gain = score - before.accuracy
    change = f"{gain:+.3f}"
    if right_or_wrong:
        change = f"{100 * gain:+.1f} points"
    return f"{sentence} ({change} since step {before.accuracy_step})"


def stop_sentence(by: str, step: int, steps: int) -> str:
    """Return a sentence for the person who stopped a run: the step that is saved."""
    if not step:
        return f"stopped by {by} before its first step was done: nothing is saved"
    return f"stopped by {by}: step {step} of {steps} is saved; the same command goes on from there"


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run that have a state, oldest first."""
    return [path for path in folders(run_dir) if (path / STATE).is_file()]


def latest(run_dir: Path) -> Path | None:
    """Return the newest checkpoint of a run that has a state, or None."""
    return next(reversed(checkpoints(run_dir)), None)


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that nothing is resumed from it and nothing written over it.

    Returns:
        Its new name, which no reader takes for a checkpoint.
    """
    free = checkpoint.with_name(f"{checkpoint.name}.damaged")
    number = 1
    while free.exists():
        number += 1
        free = checkpoint.with_name(f"{checkpoint.name}.damaged-{number}")
    with refusing(free, key="train.run_dir"):
        return checkpoint.rename(free)


def tell_done(
    run_dir: Path, state: TrainState, config: RunConfig, changed: Sequence[Change]
) -> None:
    """Print that the run directory holds all steps, and which changes had no effect.

    Args:
        changed: settings that differ from the run's.
    """
    summary = state.summary(right_or_wrong=config.reward.right_or_wrong)
    print(f"{run_dir} has all {state.step} steps: {summary}")
    if unused := [str(change) for change in changed if change.key != "train.steps"]:
        print(
            f"not used, as no step was left to do: {', '.join(unused)}; set train.steps above "
            f"{state.step} to go on with this, or train.run_dir to a new folder to begin again"
        )
    for file in changed_files(config.data, (state.cursor or {}).get("files", {})).values():
        print(f"{file} has changed since this run read it, and nothing was trained on it as it is")
    print(f"report: {run_dir / 'report.html'}", flush=True)


def refuse_other_run(run_dir: Path, config: RunConfig) -> list[Change]:
    """Return the settings that differ from the directory's run, all of which may change.

    Without a checkpoint there is no run yet: one that failed before its first step pins nothing.

    Raises:
        ConfigError: a changed setting would make it another run.
    """
    recipe = run_dir / RECIPE
    with refusing(run_dir, key="train.run_dir"):  # also of a name that no folder can have
        has_begun = latest(run_dir) is not None
    if not (has_begun and recipe.is_file()):
        return []
    changed = changes(recipe_of(run_dir), config)
    if other := refused(changed):
        raise ConfigError(
            f"{run_dir} holds another run ({', '.join(map(str, other))}); undo that to go on with "
            "it, set train.run_dir to a new folder to begin again, or call `qurl train` with "
            f"train.run_dir={run_dir} --fork NEW_RUN_DIR to go on there, changed like this"
        )
    return changed


def recipe_of(run_dir: Path) -> RunConfig:
    """Return the recipe that a run keeps in its folder.

    Raises:
        ConfigError: it cannot be read, or breaks the rules that recipes have now.
    """
    recipe = run_dir / RECIPE
    try:
        return load(recipe)
    except ConfigError as error:
        raise ConfigError(
            f"{recipe}, which says what run this folder holds, cannot be used: {error}; change it "
            "there to what the run was started with, or set train.run_dir to a new folder"
        ) from None


@dataclass(frozen=True)
class Claim:
    """A run directory, locked until it is left or the process ends."""

    run_dir: Path
    config: RunConfig
    changes: list[Change]  # since the run was started last; all of them may change
    lock: TextIO

    def keep_recipe(self) -> None:
        """Write the recipe into the directory, whole or not at all.

        Raises:
            ConfigError: it cannot be written.
        """
        recipe = self.run_dir / RECIPE
        with refusing(recipe, key="train.run_dir"):
            write_whole(recipe, f"# The run's recipe.\n\n{to_toml(self.config)}")

    def refuse_another_folder(self) -> None:
        """Raise ``ConfigError`` where the directory is no longer the one that was claimed."""
        try:
            same = os.path.samestat(os.fstat(self.lock.fileno()), os.stat(self.lock.name))
        except OSError:
            same = False
        if not same:
            raise ConfigError(
                f"{self.run_dir} was renamed, deleted or replaced while the run was at work, so "
                "nothing more is written; put it back, and the same command goes on from its "
                "newest checkpoint"
            )

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *exception: object) -> None:
        self.lock.close()


def claim(run_dir: Path, config: RunConfig) -> Claim:
    """Lock the run directory, and write the recipe into it.

    A changed recipe is for the caller to keep, once the changes are printed: a run that is stopped
    before that prints them at its next start.

    Raises:
        ConfigError: the directory holds another run, a process is at work in it, or it cannot be
            made or written.
    """
    refuse_other_run(run_dir, config)
    with refusing(run_dir, key="train.run_dir"):
        run_dir.mkdir(parents=True, exist_ok=True)
        lock_file = (run_dir / ".lock").open("w")
        locked = lock(lock_file)
    if not locked:
        raise ConfigError(
            f"{run_dir} is in use by a run that has not ended; wait for it, stop it, "
            "or set train.run_dir to a new folder"
        )
    claimed = Claim(run_dir, config, refuse_other_run(run_dir, config), lock_file)
    if not claimed.changes:
        claimed.keep_recipe()
    return claimed
