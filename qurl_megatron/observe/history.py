"""The metrics of a run over its steps, as the report, studies and benchmarks read them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from qurl_megatron.observe.sinks import Record
from qurl_megatron.observe.text import number, percent

Series = tuple[np.ndarray, np.ndarray]
"""Steps and values, equally long and not empty."""


class History:
    """Each metric over the steps at which it was measured; non-finite values are counted apart."""

    def __init__(self, records: Iterable[Record]) -> None:
        points: dict[str, dict[int, float]] = {}
        for record in records:
            for name, value in record.metrics.items():
                points.setdefault(name, {})[record.step] = value
        self.first_step = min((min(by_step) for by_step in points.values()), default=0)
        self.last_step = max((max(by_step) for by_step in points.values()), default=0)
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

    def __contains__(self, name: str) -> bool:
        return name in self._series

    def __iter__(self) -> Iterator[str]:
        return iter(self._series)

    def series(self, name: str) -> Series:
        return self._series[name]

    def stretches(self, name: str) -> list[Series]:
        """Return the series, cut where another way of measuring began, oldest part first.

        Never compare the parts. A metric such as ``eval/measured_since`` marks the cuts of its
        group: its value is the last step that was measured as before.
        """
        steps, values = self.series(name)
        _, cuts = self._series.get(f"{name.split('/')[0]}/measured_since", ((), ()))
        places = sorted({int(np.searchsorted(steps, cut, side="right")) for cut in cuts})
        places = [place for place in places if 0 < place < len(steps)]
        return list(zip(np.split(steps, places), np.split(values, places), strict=True))

    def newest(self, name: str) -> Series:
        """Return the part of the series that is measured as now; text and tiles report it."""
        return self.stretches(name)[-1]

    def since(self, name: str) -> str:
        """Return ", since step 31" where an older part was measured otherwise, else ""."""
        stretches = self.stretches(name)
        return f", since step {stretches[-1][0][0]}" if stretches[1:] else ""

    def last(self, name: str) -> float | None:
        return float(self._series[name][1][-1]) if name in self._series else None

    def mean(self, name: str) -> float:
        """Return the mean over steps, 0 where the metric was never measured."""
        return float(self._series[name][1].mean()) if name in self._series else 0.0


def unscored(history: History) -> float:
    """Return the share of responses that got no score, as a mean over steps."""
    if "reward/failed_fraction" not in history:
        return 0.0
    return float(history.newest("reward/failed_fraction")[1].mean())


def what_acted(history: History, algo: Mapping[str, Any]) -> str:
    """Say in one sentence whether ``algo.objective`` corrected any token of the run.

    At 8 bits an importance weight above the cap C is rare: most runs under ACR train as they would
    without it, and nobody should take their success for its merit.

    Args:
        algo: this section of the recipe, resolved.

    Returns:
        The sentence without its full stop; "" where nothing compared the policies.
    """
    objective, cap = algo.get("objective"), algo.get("cap", 0)
    if "rollout/rho_max" not in history:
        return ""
    ratio = history.series("rollout/rho_max")[1].max()
    largest = f"largest {number(ratio)}"
    if algo.get("function"):
        return f"the loss is algo.function={algo['function']} (probability ratio: {largest})"
    if objective == "acr":
        if active := history.mean("acr/active_fraction"):
            rescued = percent(history.mean("acr/rescued_fraction"))
            return (
                f"ACR acted: a wider clip range for {percent(active)} of the tokens, {rescued} "
                f"rescued from TIS's (C = {cap:g}, largest importance weight {number(ratio)})"
            )
        if ratio <= cap:
            return f"ACR never acted: no importance weight above C = {cap:g} ({largest})"
        return (
            "ACR never acted: no token of a positive advantage had an importance weight above "
            f"C = {cap:g} ({largest})"
        )
    if objective == "tis":
        if cut := history.mean("rollout/truncated_weight_fraction"):
            return f"TIS acted: {percent(cut)} of the importance weights cut to {cap:g} ({largest})"
        return f"TIS never acted: no importance weight above C = {cap:g} ({largest})"
    if objective == "icepop":
        if left_out := history.mean("correction/banded_fraction"):
            return f"IcePop acted: {percent(left_out)} of the tokens left out ({largest})"
        return f"IcePop never acted: no importance weight outside its band ({largest})"
    if objective == "decoupled":
        return f"every token is weighted by its probability ratio, without a cap ({largest})"
    if objective in ("naive", "proximal"):
        return f"algo.objective={objective} corrects nothing (probability ratio: {largest})"
    return ""
