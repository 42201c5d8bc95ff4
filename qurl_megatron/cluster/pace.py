"""The pace of a run: when its ranks must be told to end, and when it is stuck.

Everything is read from the run's folder, so the supervisor sees it without asking the ranks.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from qurl_megatron.cluster.cluster import JobConfig
from qurl_megatron.cluster.verdict import PREEMPTED, WALL_TIME
from qurl_megatron.training.state import latest

RECENT = 50
"""Steps that are looked at: lengths of responses, and so of steps, drift over a run."""
TAIL = 1 << 20
"""Bytes at a file's end that are read; files of long runs have many times that."""
MARGIN_S = 30.0
"""For goodbyes of ranks and engines, and a busy file system."""
GLANCE_S = 10.0
"""The most that one look at the clock adds to a run's stillness. Looks are a second apart: a longer
gap is a supervisor that was suspended together with its job."""
EARLY_S = 60.0
"""By which Slurm's signal may be early."""


@dataclass(frozen=True)
class Pace:
    """Seconds that steps and checkpoints have taken; empty where none has been seen."""

    steps: tuple[float, ...] = ()
    saves: tuple[float, ...] = ()

    @property
    def stop_s(self) -> float | None:
        """Seconds that the longest step, a save and the goodbyes take; None: not measured yet."""
        if not (self.steps and self.saves):
            return None
        return max(self.steps) + max(self.saves) + MARGIN_S

    def patience_s(self, limits: JobConfig) -> float:
        """Seconds without a new step after which a run is stuck."""
        if not self.steps:
            return limits.hung_s
        return max(limits.hung_s, limits.hung_steps * median(self.steps))

    def without_pauses(self, limits: JobConfig) -> "Pace":
        """Leave out times longer than ``patience_s``: the job was suspended meanwhile, by gang
        scheduling or an operator, and that says nothing of the next step."""
        longest = self.patience_s(limits)
        return Pace(
            tuple(seconds for seconds in self.steps if seconds <= longest),
            tuple(seconds for seconds in self.saves if seconds <= longest),
        )


def measured(run_dir: Path, since: float) -> Pace:
    """Read how long the last steps and checkpoints took.

    Args:
        since: Unix seconds at which this attempt began; between two steps of earlier ones may lie a
            night in the queue.
    """
    steps, previous = [], None
    for record in _lines(run_dir / "metrics.jsonl"):
        with contextlib.suppress(KeyError, TypeError, ValueError):  # ranks say so on resuming
            seconds, at = float(record["metrics"]["time/step"]), float(record["time"])
            if previous is not None and previous >= since:
                # With the evaluation and the checkpoint after the step before.
                seconds = max(seconds, at - previous)
            steps.append(seconds)
            previous = at
    saves = []
    for span in _lines(run_dir / "timeline.jsonl"):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if span["name"] == "save":
                saves.append(float(span["end"]) - float(span["start"]))
    return Pace(tuple(steps[-RECENT:]), tuple(saves[-RECENT:]))


def _lines(path: Path) -> Iterator[dict]:
    """Yield the JSON of the whole lines at a file's end."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        start = max(0, file.seek(0, 2) - TAIL)
        file.seek(start)
        lines = file.read().split(b"\n")
    for line in lines[bool(start) : -1]:  # the first and the last may be parts
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def progress_mark(run_dir: Path) -> tuple[int, str]:
    """Return a value that changes with every step and with every checkpoint."""
    metrics, newest = run_dir / "metrics.jsonl", latest(run_dir)
    size = metrics.stat().st_size if metrics.exists() else 0
    return size, newest.name if newest else ""


class Stillness:
    """For how long a run has not moved, while its supervisor could have seen it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._at, self._seconds = clock, clock(), 0.0

    def seconds(self) -> float:
        """Count up to now; to be called more often than every ``GLANCE_S``."""
        before, self._at = self._at, self._clock()
        self._seconds += min(self._at - before, GLANCE_S)
        return self._seconds

    def moved(self) -> None:
        """Begin again at the last look."""
        self._seconds = 0.0


def due(
    at: float,
    received: str,
    *,
    end: float | None,
    stop_s: float | None,
    signal_s: float,
    preempted: bool = False,
) -> str:
    """Return why the ranks must be told to end now; "" where they need not yet.

    Slurm's signal before the time limit is put off where less time is needed. One that comes
    at another time is somebody's, and is heeded at once.

    Args:
        at: now, Unix seconds.
        received: name of the newest signal.
        end: when the job's time is up, Unix seconds; None: not known.
        stop_s: seconds for a step, a save and goodbyes; None: not measured.
        signal_s: seconds before the end at which Slurm sends its signal.
    """
    if preempted:
        return PREEMPTED
    if received and received != WALL_TIME:
        return received
    if end is None or stop_s is None:
        return received
    if at >= end - stop_s:
        return WALL_TIME
    from_slurm = at >= end - signal_s - EARLY_S
    return "" if from_slurm else received
