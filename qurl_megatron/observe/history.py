"""The metrics of a run over its steps, as the report, studies and benchmarks read them."""

from collections.abc import Iterable

import numpy as np

from qurl_megatron.observe.sinks import Record

Series = tuple[np.ndarray, np.ndarray]
"""Steps and values, equally long and not empty."""


class History:
    """Each metric over the steps at which it was measured; non-finite values are counted apart."""

    def __init__(self, records: Iterable[Record]) -> None:
        points: dict[str, dict[int, float]] = {}
        for record in records:
            for name, value in record.metrics.items():
                points.setdefault(name, {})[record.step] = value
        self.non_finite: dict[str, int] = {}
        self._series: dict[str, Series] = {}
        for name, by_step in points.items():
            steps = np.array(sorted(by_step))
            values = np.array([by_step[step] for step in steps], dtype=float)
            finite = np.isfinite(values)
            if not finite.all():
                self.non_finite[name] = int((~finite).sum())
            if finite.any():
                self._series[name] = steps[finite], values[finite]
        every_step = [step for by_step in points.values() for step in by_step]
        self.first_step = min(every_step, default=0)
        self.last_step = max(every_step, default=0)

    def __contains__(self, name: str) -> bool:
        return name in self._series

    def __iter__(self):
        return iter(self._series)

    def series(self, name: str) -> Series:
        """Steps and values, equally long and not empty."""
        return self._series[name]

    def stretches(self, name: str) -> list[Series]:
        """The series, cut where it began to be measured otherwise, oldest part first; nothing
        compares the parts.

        Metrics tell it by another of their group, e.g. ``eval/measured_since`` of eval/accuracy.
        """
        steps, values = self.series(name)
        _, cuts = self._series.get(f"{name.split('/')[0]}/measured_since", ((), ()))
        at = sorted({int(np.searchsorted(steps, cut, side="right")) for cut in cuts})
        at = [index for index in at if 0 < index < len(steps)]
        return list(zip(np.split(steps, at), np.split(values, at), strict=True))

    def newest(self, name: str) -> Series:
        """The part of the series that is measured as now: the part that text and tiles report."""
        return self.stretches(name)[-1]

    def since(self, name: str) -> str:
        """The words ``, since step 31`` where an older part was measured otherwise, else none."""
        stretches = self.stretches(name)
        return f", since step {stretches[-1][0][0]}" if stretches[1:] else ""

    def last(self, name: str) -> float | None:
        return float(self._series[name][1][-1]) if name in self._series else None
