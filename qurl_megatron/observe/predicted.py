"""What ``qurl plan`` predicted for a run, beside what the run measured.

``qurl plan RECIPE ... --json > RUN_DIR/plan.json`` leaves the prediction in the run's folder.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.history import History

PLAN_FILE = "plan.json"


@dataclass(frozen=True)
class ComparedPhase:
    """One phase; seconds of a step."""

    name: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted


def compared(run_dir: Path, history: History) -> list[ComparedPhase]:
    """The phases of the run's layout that both know; none without a prediction.

    Raises:
        ConfigError: plan.json is not what ``qurl plan --json`` writes.
    """
    path = run_dir / PLAN_FILE
    if not path.is_file():
        return []
    try:
        layout = json.loads(path.read_text(encoding="utf-8"))["own"]
        metrics = {} if layout is None else layout["metrics"]  # the run's own layout did not fit
        predicted = {str(name): float(value) for name, value in metrics.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{path} is not what `qurl plan --json` writes; write it again, or delete it"
        ) from None
    return [
        ComparedPhase(name.removeprefix("time/"), value, median(_settled(history, name)))
        for name, value in predicted.items()
        if name in history and value > 0
    ]


def _settled(history: History, name: str) -> list[float]:
    """Without the first step, which compiles and allocates."""
    values = history.series(name)[1].tolist()
    return values[1:] or values
