"""Results of a benchmark: figures by case, each beside its limit.

A **figure** is one measured quantity, all its repeats kept. A **case** is one setting (a scheme, a
batch, an engine) with its figures. A **record** is one run of one benchmark on one machine, and the
JSON file that it leaves. Repeat i of every case was measured in the same round, beside the
yardstick's i-th time, so cases of one record can be compared round by round. Two records share no
rounds: each repeat is divided by its yardstick, and all of one are set against all of the other
(``bench.against``).
"""

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.errors import ConfigError, reading
from qurl_megatron.kit.filesystem import refusing
from qurl_megatron.observe.text import NARROW_SPACE, number

SCHEMA = "qurl-bench/1"

REASONS = {
    "another load": "something else used the machine meanwhile",
    "not run": "it cannot be run here; its note says why",
    "failed": "it ended with an error; its note says which",
    "client-bound": "the load generator was too slow to see what the engine can do",
    "wrong lengths": "responses came back longer or shorter than was asked for",
    "cache hits": "prompts that nobody had sent were in the engine's cache",
    "failed requests": "requests failed; their tokens are not counted, their time is",
    "preempted requests": "the engine took requests back for lack of room, and computed them again",
    "requests waited": "the engine had no room for all requests of a batch at once",
    "identical samples": "samples of one prompt are the same, so the engine did not sample each",
    "failed publication": "a new version of the weights did not reach the engine",
    "engine changed": "the engine is not the one that it was at the first repeat",
}
"""Why a case cannot be compared. A benchmark with reasons of its own adds rows here."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One quantity, measured once or more."""

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
    keys: Mapping[
        str, str | int | float | bool | None
    ]  # all that was set: scheme, batch, steps, ...
    figures: list[Figure] = field(default_factory=list)
    yardsticks: list[float] = field(default_factory=list)  # seconds, beside each repeat
    reasons: list[str] = field(default_factory=list)  # names from REASONS; empty: it is valid
    notes: dict[str, Any] = field(default_factory=dict)

    def why(self, reason: str) -> str:
        """Return a reason with its case's note, or with its meaning."""
        meaning = self.notes.get(reason, REASONS.get(reason, ""))
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

    def write(self, path: Path) -> None:
        """Write it as JSON.

        Raises:
            ConfigError: it cannot be written; an older file stays whole.
        """
        with refusing(path, key="--out"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(asdict(self), indent=1) + "\n")

    def table(self) -> str:
        """For a terminal: a line per figure, and the reasons of cases that cannot be compared."""
        lines: list[tuple[str, ...]] = [HEADS]
        for case in self.cases:
            first = case.name
            for figure in case.figures:
                lines.append((first, *cells(figure)))
                first = ""
            for reason in case.reasons:
                lines.append((first, case.why(reason)))
                first = ""
        full = [line for line in lines if len(line) == len(HEADS)]
        widths = [max(len(line[i]) for line in full) for i in range(len(HEADS))]
        widths[0] = max(len(line[0]) for line in lines)
        return "".join(_line(line, widths) + "\n" for line in lines)


HEADS = ("case", "figure", "median", "unit", "spread", "limit", "share")
LEFT = ("case", "figure", "unit")


def cells(figure: Figure) -> tuple[str, ...]:
    """Return a figure's cells of a table, by ``HEADS`` after the first."""
    return (
        figure.name,
        number(figure.median),
        figure.unit,
        f"±{percent(figure.spread)}" if len(figure.repeats) > 1 else "",
        "" if figure.limit is None else f"{number(figure.limit)} {figure.limit_of}".strip(),
        "" if figure.share is None else percent(figure.share),
    )


def percent(share: float) -> str:
    """0.123 -> "12 %", 0.0123 -> "1.2 %"."""
    return f"{100 * share:.{0 if share >= 0.0995 else 1}f}{NARROW_SPACE}%"


def _line(line: tuple[str, ...], widths: list[int]) -> str:
    if len(line) < len(HEADS):  # a case's reasons take the rest of the line
        return f"{line[0]:<{widths[0]}}  {line[1]}"
    columns = zip(HEADS, line, widths, strict=True)
    return "  ".join(f"{text:{'<' if h in LEFT else '>'}{w}}" for h, text, w in columns).rstrip()


def read(path: Path) -> BenchRecord:
    """Read a record back.

    Raises:
        ConfigError: the file is missing, or is not a record of this schema.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        with reading(path):
            text = path.read_text(encoding="utf-8")
        record = json.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give a file that qurl bench wrote") from None
    except ValueError:
        raise ConfigError(f"{path} is not JSON; give a file that qurl bench wrote") from None
    schema = record.get("schema") if isinstance(record, dict) else None
    if schema != SCHEMA:
        raise ConfigError(
            f"{path} has schema {schema!r}, this version reads {SCHEMA!r}; measure it again"
        )
    try:
        return TypeAdapter(BenchRecord).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field_path = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {field_path}: {first['msg']}; measure it again") from None
