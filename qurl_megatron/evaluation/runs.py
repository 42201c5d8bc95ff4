"""What the folder of one run tells about it, whoever started the run.

OUT/runs/naive-int4-seed-0/    train.run_dir of a cell; trained/ in it is of ``study.trained``
OUT/logs/naive-int4-seed-0.log what its ``qurl train`` printed
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qurl_megatron.config import load
from qurl_megatron.evaluation.plan import Cell, Study
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.history import History
from qurl_megatron.observe.sinks import METRICS_FILE, read_metrics
from qurl_megatron.training.state import refuse_other_run


@dataclass(frozen=True)
class RunLook:
    """A run as its folder shows it."""

    state: Literal["done", "failed", "waiting"]
    history: History | None = None  # up to the last step that the study asks for
    reason: str = ""  # of a failure

    @property
    def step(self) -> int:
        return self.history.last_step if self.history else 0


def run_dir(out: Path, cell: Cell) -> Path:
    """A run that an older study has begun stays where it is."""
    old = out / "runs" / cell.old_name
    return old if old.is_dir() else out / "runs" / cell.name


def log_file(out: Path, cell: Cell) -> Path:
    return out / "logs" / f"{run_dir(out, cell).name}.log"


def look(study: Study, cell: Cell, out: Path) -> RunLook:
    """Done: all steps are measured, and the last one is evaluated where the recipe evaluates.

    Failed: the folder holds another run, be it one that ``qurl train`` would go on with, or its
    metrics are damaged.
    """
    folder = run_dir(out, cell)
    metrics = folder / METRICS_FILE
    if not metrics.is_file() or b"\n" not in metrics.read_bytes():
        return RunLook("waiting")
    try:
        changed = refuse_other_run(folder, load(study.recipe, cell.overrides))
        if other := [change for change in changed if change.rule != "free"]:
            differences = "; ".join(map(str, other))
            raise ConfigError(
                f"{folder} holds a run with other settings ({differences}); move it away"
            )
        records = read_metrics(metrics)
    except ConfigError as error:
        return RunLook("failed", reason=str(error))
    history = History(record for record in records if record.step <= cell.steps)
    evaluated = any(
        name in history and history.series(name)[0][-1] == cell.steps
        for name in ("eval/accuracy", "eval/reward")
    )
    done = history.last_step == cell.steps and (evaluated or not cell.evaluated)
    return RunLook("done" if done else "waiting", history)
