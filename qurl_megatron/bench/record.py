"""Results of a benchmark: figures by case.

A **figure** is one measured quantity, all its repeats kept, some beside the limit of the machine. A
**case** is one setting (a scheme, a layout) with its figures. A **record** is one run of one
benchmark on one machine, and the JSON file that it leaves. Repeat i of every case was measured in
the same round, beside the yardstick's i-th time.
"""

import json
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from qurl_megatron.bench.environment import environment, load, started
from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.filesystem import refusing
from qurl_megatron.observe.text import NARROW_SPACE, aligned, number

SCHEMA = "qurl-bench/1"

ANOTHER_LOAD = "another load"
MEANINGS = {ANOTHER_LOAD: "something else used the machine meanwhile"}
"""Of reasons without a note of their case."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured quantity of one case."""

    name: str
    unit: str
    better: Literal["higher", "lower"] | None  # None: only reported, never compared
    repeats: list[float]
    limit: float | None = None  # of the machine, in the same unit
    limit_of: str = ""  # its source: "DRAM bytes", "INT8 products", ...

    def __post_init__(self) -> None:
        if not self.repeats:
            raise ValueError(f"{self.name} has no repeats")

    @property
    def median(self) -> float:
        return statistics.median(self.repeats)

    @property
    def spread(self) -> float:
        """Half of the interquartile range over the median; 0 of a single repeat."""
        if len(self.repeats) < 2 or not self.median:
            return 0.0
        low, _, high = statistics.quantiles(self.repeats, n=4, method="inclusive")
        return (high - low) / 2 / abs(self.median)

    @property
    def share(self) -> float | None:
        """Of the limit that was reached: 1 is as fast, or as small, as the machine allows."""
        if not self.limit or not self.median or not self.better:
            return None
        return self.median / self.limit if self.better == "higher" else self.limit / self.median


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setting, and its figures."""

    name: str
    keys: Mapping[str, str | int | float | bool | None]  # all that was set
    figures: list[Figure] = field(default_factory=list)
    yardsticks: list[float] = field(default_factory=list)  # seconds, beside each repeat
    reasons: list[str] = field(default_factory=list)  # not to compare it; empty: it is valid
    notes: dict[str, Any] = field(default_factory=dict)

    def why(self, reason: str) -> str:
        """Return a reason with its case's note, or with its meaning."""
        meaning = self.notes.get(reason, MEANINGS.get(reason, ""))
        return f"{reason}: {meaning}" if meaning else reason

    def figure(self, name: str) -> Figure:
        return next(figure for figure in self.figures if figure.name == name)


@dataclass(frozen=True, kw_only=True)
class BenchRecord:
    """One run of one benchmark."""

    benchmark: str
    command: str
    started: str  # UTC, ISO 8601
    environment: dict[str, Any]
    cases: list[Case]
    schema: str = SCHEMA

    def keep(self, folder: Path | None) -> None:
        """Print the table, and write BENCHMARK.json to ``folder``, if there is one.

        Raises:
            ConfigError: it cannot be written; an older file stays whole.
        """
        print(self.table(), end="")
        if folder is None:
            return
        path = folder / f"{self.benchmark}.json"
        with refusing(path, key="--out"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(asdict(self), indent=1) + "\n")
        print(path)

    def table(self) -> str:
        """For a terminal: a line per figure, and below them why cases cannot be compared."""
        rows: list[tuple[str, ...]] = [HEADS]
        reasons = []
        for case in self.cases:
            name = case.name
            for figure in case.figures:
                rows.append((name, *cells(figure)))
                name = ""
            reasons += [f"{case.name}: {case.why(reason)}" for reason in case.reasons]
        return "\n".join([*aligned(rows, words=WORDS), *reasons]) + "\n"


def recorded(
    benchmark: str,
    program: str,
    measure: Callable[[], list[Case]],
    facts: Callable[[], dict[str, Any]] = dict,
) -> BenchRecord:
    """Return the record of the cases that ``measure`` returns.

    Args:
        program: the words of the command before its options.
        facts: called afterwards, for more facts of the machine.
    """
    start, before = started(), environment()
    cases = measure()
    command = f"{program} {shlex.join(sys.argv[1:])}"
    machine = {**before, "load_after": load(), **facts()}
    return BenchRecord(
        benchmark=benchmark, command=command, started=start, environment=machine, cases=cases
    )


HEADS = ("case", "figure", "median", "unit", "spread", "limit", "share")
WORDS = ("case", "figure", "unit")


def cells(figure: Figure) -> tuple[str, ...]:
    """Return a figure's cells of a table, by ``HEADS`` after the first."""
    spread = limit = share = ""
    if len(figure.repeats) > 1:
        spread = f"±{percent(figure.spread)}"
    if figure.limit is not None:
        limit = f"{number(figure.limit)} {figure.limit_of}".strip()
    if figure.share is not None:
        share = percent(figure.share)
    return figure.name, number(figure.median), figure.unit, spread, limit, share


def percent(share: float) -> str:
    """0.123 -> "12 %", 0.0123 -> "1.2 %"."""
    return f"{100 * share:.{0 if share >= 0.0995 else 1}f}{NARROW_SPACE}%"
