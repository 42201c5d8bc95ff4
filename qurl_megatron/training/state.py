"""What the loop remembers between two steps, beside the policy; readable without Megatron.

On disk:

    run_dir/checkpoints/step_000040/     a whole checkpoint: it was renamed into place last
    run_dir/checkpoints/.step_000040/    one the run died while writing; ignored, then replaced
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STATE = "state.json"


@dataclass(frozen=True)
class TrainState:
    """The leading rank's is saved with every checkpoint."""

    step: int = 0  # updates done; also the weight version the engines hold
    cursor: dict[str, Any] | None = None  # where the prompts go on
    accuracy_before: float | None = None  # held-out, of the model the run began with
    accuracy: float | None = None  # held-out, the newest

    @staticmethod
    def read(checkpoint: Path) -> "TrainState":
        return TrainState(**json.loads((checkpoint / STATE).read_text(encoding="utf-8")))

    def write(self, checkpoint: Path) -> None:
        (checkpoint / STATE).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

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
