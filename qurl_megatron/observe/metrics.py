"""Metrics that know their reduction: plain floats that merge exactly over microbatches and ranks;
and their history over the steps of a run.

A mean travels as its total and its weight, never as a finished average, so that merging the parts
of a batch gives the result of the whole batch. Values are Python floats: cheap to pickle,
and no tensor keeps device memory alive.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import add
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np
from msgspec.structs import astuple

if TYPE_CHECKING:
    from qurl_megatron.observe.sinks import Record

Series = tuple[np.ndarray, np.ndarray]
"""Steps and values, equally long and not empty."""


class Sums(msgspec.Struct, frozen=True):
    """A metric that is computed from sums over the samples."""

    def merged(self, other: Self) -> Self:
        """Return the metric of both parts together."""
        return type(self)(*map(add, astuple(self), astuple(other)))


class Sum(Sums, frozen=True):
    """A total, e.g. tokens generated."""

    total: float

    @property
    def value(self) -> float:
        return self.total


class Mean(Sums, frozen=True):
    """A weighted average as its parts: for a mean over tokens, their sum and their number."""

    total: float
    weight: float

    @property
    def value(self) -> float:
        """NaN where nothing was averaged."""
        if not self.weight:
            return math.nan
        return self.total / self.weight


class Max(msgspec.Struct, frozen=True):
    """The largest value; a NaN anywhere stays visible."""

    value: float

    def merged(self, other: "Max") -> "Max":
        return Max(float(np.maximum(self.value, other.value)))  # max() would lose a NaN, or not


class Min(msgspec.Struct, frozen=True):
    """The smallest value; a NaN anywhere stays visible."""

    value: float

    def merged(self, other: "Min") -> "Min":
        return Min(float(np.minimum(self.value, other.value)))


class EffectiveSampleSize(Sums, frozen=True):
    """Share of the samples that importance weights leave effective: (sum w)^2 / (n sum w^2).

    1 where all weights are equal, 1/n where one sample has all the weight.
    """

    total: float
    squares: float
    count: float

    @property
    def value(self) -> float:
        return self.total**2 / (self.squares * self.count) if self.squares else math.nan


class StdDev(Sums, frozen=True):
    """Sample deviation (n - 1) as its sums; NaN below two samples."""

    total: float
    squares: float
    count: float

    @property
    def value(self) -> float:
        if self.count < 2:
            return math.nan
        return math.sqrt(max(self.squares - self.total**2 / self.count, 0.0) / (self.count - 1))


class Cosine(Sums, frozen=True):
    """Cosine of the angle between two vectors, as the sums of their products and their squares.

    0 where one of them is zero: it goes nowhere.
    """

    together: float
    first: float
    second: float

    @property
    def value(self) -> float:
        lengths = math.sqrt(self.first) * math.sqrt(self.second)
        return min(max(self.together / lengths, -1.0), 1.0) if lengths else 0.0


class ExplainedVariance(Sums, frozen=True):
    """How much of a target's variance a prediction explains: 1 - Var(target - prediction) /
    Var(target), as its sums.

    1 is perfect, 0 no better than a constant, below 0 worse; NaN where the target does not vary.
    """

    target: float
    target_squares: float
    error: float
    error_squares: float
    count: float

    @property
    def value(self) -> float:
        if not self.count:
            return math.nan
        spread = self.target_squares - self.target**2 / self.count
        missed = max(self.error_squares - self.error**2 / self.count, 0.0)
        # So small a variance is a constant's rounding error.
        if spread <= 1e-12 * self.target_squares:
            return math.nan
        return 1.0 - missed / spread


Metric = Sum | Mean | Max | Min | EffectiveSampleSize | StdDev | Cosine | ExplainedVariance


def merge(many: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of every microbatch, or of every rank, into one per name."""
    merged: dict[str, Metric] = {}
    for metrics in many:
        for name, metric in metrics.items():
            earlier = merged.get(name)
            assert earlier is None or type(earlier) is type(metric), (
                f"metric {name} is a {type(earlier).__name__} in one place "
                f"and a {type(metric).__name__} in another"
            )
            if earlier is not None:
                metric = earlier.merged(metric)  # type: ignore[arg-type]  # of one type: see above
            merged[name] = metric
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return each metric's number; a mean over nothing is NaN."""
    return {name: float(metric.value) for name, metric in metrics.items()}


class Timer:
    """Seconds spent in each phase of one step; make a new one for every step.

    Over ranks the slowest counts (``Max``), since the others wait for it.

        timer = Timer(announce=progress.phase)
        with timer.phase("rollout"):
            ...
        metrics |= timer.metrics()  # time/rollout and time/step
    """

    def __init__(
        self,
        announce: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        record: Callable[[str, float], None] | None = None,
    ) -> None:
        """Call ``announce`` with the name of each phase that begins, and ``record`` with name and
        seconds of each that ends."""
        self._announce = announce
        self._record = record
        self._clock = clock
        self._start = clock()
        self._seconds: dict[str, float] = {}
        self._current: str | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of this block to ``time/<name>``; a phase may be entered again."""
        assert self._current is None, f"phase {name} inside {self._current} would count twice"
        if self._announce is not None:
            self._announce(name)
        self._current, start = name, self._clock()
        try:
            yield
        finally:
            self._current = None
            self.add(name, self._clock() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds of a phase that was measured elsewhere and ends now."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        if self._record is not None:
            self._record(name, seconds)

    def metrics(self) -> dict[str, Metric]:
        """Return ``time/<phase>`` for each phase, and ``time/step`` since the timer was made."""
        seconds = {**self._seconds, "step": self._clock() - self._start}
        return {f"time/{name}": Max(value) for name, value in seconds.items()}


class History(dict[str, Series]):
    """Each metric over the steps at which it was measured; non-finite values are counted apart."""

    def __init__(self, records: Iterable["Record"] = ()) -> None:
        super().__init__()
        points: dict[str, dict[int, float]] = {}
        for record in records:
            for name, value in record.metrics.items():
                points.setdefault(name, {})[record.step] = value
        self.first_step = min((min(by_step) for by_step in points.values()), default=0)
        self.last_step = max((max(by_step) for by_step in points.values()), default=0)
        self.non_finite: dict[str, int] = {}
        for name, by_step in points.items():
            steps = np.array(sorted(by_step))
            values = np.array([by_step[step] for step in steps], dtype=float)
            finite = np.isfinite(values)
            if not finite.all():
                self.non_finite[name] = int((~finite).sum())
            if finite.any():
                self[name] = steps[finite], values[finite]

    def mean(self, name: str) -> float:
        """Return the mean over steps, 0 where the metric was never measured."""
        if name not in self:
            return 0.0
        return float(self[name][1].mean())
