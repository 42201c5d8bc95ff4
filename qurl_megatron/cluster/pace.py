"""How fast a run is, by what it writes: when its ranks must be told to end, and when it is stuck.

Everything is read from the run's folder, so the supervisor sees it without asking the ranks.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from qurl_megatron.training.state import latest

RECENT = 50
"""Steps that are looked at: lengths of responses, and so of steps, drift over a run."""
TAIL = 1 << 20
"""Bytes at a file's end that are read; files of long runs have many times that."""
MARGIN_S = 30.0
"""For what is not measured: goodbyes of ranks and engines, a busy file system."""
SEEN_S = 10.0
"""The most that one look at the clock adds to a run's stillness: looks are a second apart, and what
is longer is a supervisor that was suspended together with its job."""


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

    def patience_s(self, floor_s: float, factor: float) -> float:
        """Seconds without a new step after which a run is stuck."""
        return max(floor_s, factor * median(self.steps)) if self.steps else floor_s

    def without_pauses(self, floor_s: float, factor: float) -> "Pace":
        """Without what took longer than a supervisor has patience for: the job was suspended then,
        by gang scheduling or an operator, and a night of that says nothing of the next step."""
        longest = self.patience_s(floor_s, factor)
        return Pace(
            tuple(duration for duration in self.steps if duration <= longest),
            tuple(duration for duration in self.saves if duration <= longest),
        )


class Stillness:
    """For how long a run has not moved, while its supervisor could have seen it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._at, self._seconds = clock, clock(), 0.0

    def seconds(self) -> float:
        """Up to now; to be asked more often than every ``SEEN_S``."""
        before, self._at = self._at, self._clock()
        self._seconds += min(self._at - before, SEEN_S)
        return self._seconds

    def moved(self) -> None:
        """It has, by what was seen last."""
        self._seconds = 0.0


def measured(run_dir: Path, since: float) -> Pace:
    """
    Args:
        since: Unix seconds at which this attempt began; what lies between two steps of earlier ones
            may be a night in the queue.
    """
    steps, previous = [], None
    for record in _lines(run_dir / "metrics.jsonl"):
        with suppress(KeyError, TypeError, ValueError):  # edited by hand; ranks say so on resuming
            seconds, at = float(record["metrics"]["time/step"]), float(record["time"])
            if previous is not None and previous >= since:
                # With the evaluation and the checkpoint after the step before.
                seconds = max(seconds, at - previous)
            steps.append(seconds)
            previous = at
    saves = []
    for span in _lines(run_dir / "timeline.jsonl"):
        with suppress(KeyError, TypeError, ValueError):
            if span["name"] == "save":
                saves.append(float(span["end"]) - float(span["start"]))
    return Pace(tuple(steps[-RECENT:]), tuple(saves[-RECENT:]))


def mark(run_dir: Path) -> tuple[int, str]:
    """What changes with every step that is done, and with every checkpoint."""
    metrics, newest = run_dir / "metrics.jsonl", latest(run_dir)
    size = metrics.stat().st_size if metrics.exists() else 0
    return size, newest.name if newest else ""


def _lines(path: Path) -> Iterator[dict]:
    """The whole lines at a file's end that are JSON."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        start = max(0, file.seek(0, 2) - TAIL)
        file.seek(start)
        lines = file.read().split(b"\n")
        for line in lines[bool(start) : -1]:  # the first and the last may be parts
            with suppress(ValueError):
                yield json.loads(line)
