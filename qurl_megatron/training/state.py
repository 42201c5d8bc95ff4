"""What the loop remembers between two steps, beside the policy; readable without Megatron.

On disk:

    run_dir/checkpoints/step_000040/     a whole checkpoint: it was renamed into place last
    run_dir/checkpoints/.step_000040/    one the run died while writing; ignored, then replaced
"""

import fcntl
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from qurl_megatron.config import RunConfig, differences, load, to_toml
from qurl_megatron.errors import ConfigError

STATE = "state.json"
RECIPE = "config.toml"


@dataclass(frozen=True)
class TrainState:
    """The leading rank's is saved with every checkpoint."""

    step: int = 0  # updates done; also the weight version the engines hold
    cursor: dict[str, Any] | None = None  # where the prompts go on
    accuracy_before: float | None = None  # held-out, of the model the run began with
    accuracy: float | None = None  # held-out, the newest
    guard: dict[str, int] = field(default_factory=dict)  # steps in a row, by crossed threshold
    unquantized_since: int | None = None  # version; the guard fell back to unquantized rollouts
    notice: str = ""  # what the guard did last

    @staticmethod
    def read(checkpoint: Path) -> "TrainState":
        path = checkpoint / STATE
        try:
            return TrainState(**json.loads(path.read_text(encoding="utf-8")))
        except (json.JSONDecodeError, TypeError) as error:
            raise ConfigError(
                f"{path} is damaged ({error}); delete the folder to resume from the one before"
            ) from None

    def write(self, checkpoint: Path) -> None:
        (checkpoint / STATE).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    def scheme(self, configured: str) -> str:
        """The number format that rollout weights have from here on."""
        return configured if self.unquantized_since is None else "none"

    def summary(self) -> str:
        """How far the run has come, for a person."""
        text = f"step {self.step} done"
        if self.accuracy is None:
            return text
        points = 100 * (self.accuracy - self.accuracy_before)
        return (
            f"{text}; held-out accuracy {self.accuracy_before:.1%} before, "
            f"{self.accuracy:.1%} after ({points:+.1f} points)"
        )


def checkpoints(run_dir: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = (run_dir / "checkpoints").glob("step_*")
    return sorted(path for path in found if (path / STATE).is_file())


def latest(run_dir: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None."""
    return next(reversed(checkpoints(run_dir)), None)


def tell_done(run_dir: Path, state: TrainState) -> None:
    """Tell that the run directory holds all the steps the recipe asks for."""
    print(f"{run_dir} has all {state.step} steps: {state.summary()}")
    print(f"report: {run_dir / 'report.html'}", flush=True)


def refuse_other_run(run_dir: Path, config: RunConfig) -> None:
    """Raise ``ConfigError`` where the directory holds a run that computes something else."""
    recipe = run_dir / RECIPE
    if latest(run_dir) and recipe.is_file():
        changed = differences(load(recipe), config)
        if changed:
            raise ConfigError(
                f"{run_dir} holds another run ({'; '.join(changed)}); "
                "set train.run_dir to a new folder"
            )


def claim(run_dir: Path, config: RunConfig) -> TextIO:
    """Write the recipe into the run directory and lock it.

    Returns:
        The lock: the directory is this process' own until the file is closed or the process ends.

    Raises:
        ConfigError: the directory holds another run, or a process is at work in it.
    """
    refuse_other_run(run_dir, config)
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = (run_dir / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{run_dir} is in use by a run that has not ended; wait for it, stop it, "
            "or set train.run_dir to a new folder"
        ) from None
    (run_dir / RECIPE).write_text(to_toml(config), encoding="utf-8")
    return lock
