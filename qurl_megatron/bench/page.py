"""Records as one HTML page that works offline: a picture like the paper's Figure 8, and tables.

``write_page(DIR)`` puts all records of a folder on DIR/index.html, in the style of a run's report.
"""

import io
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FuncFormatter

from qurl_megatron.bench.environment import beside
from qurl_megatron.bench.record import HEADS, BenchRecord, Case, Figure, cells, records_in
from qurl_megatron.disk import write_whole
from qurl_megatron.errors import ConfigError
from qurl_megatron.observe.drawing import STYLE, for_html
from qurl_megatron.observe.html import page
from qurl_megatron.observe.panels import COLORS
from qurl_megatron.observe.text import number
from qurl_megatron.runtime.filesystem import refusing

PAGE = "index.html"
SERIES = ("scheme", "way", "who", "engine")
"""The key whose values are told apart by colour is the first of these that cases differ in."""
PALETTE = ("blue", "orange", "green", "purple", "yellow", "muted", "other", "ink")
CAPTION = (
    "Bars are medians, thin lines the middle half of the repeats. A dash is the limit of its bar, "
    "a ring what was predicted. Pale bars cannot be compared; the table says why."
)
GROUPS = 6  # in a row
FILLED = 0.84  # of a group's room, by bars
LOG = 100  # heights that differ by more stand on a log scale


@dataclass(frozen=True)
class DrawnRecord:
    """One record, drawn, with what the page writes around it."""

    record: BenchRecord
    title: str
    facts: list[str]
    svg: str  # "" where nothing can be drawn
    legend: list[tuple[str, str]]  # label, colour
    notes: list[tuple[str, str]]  # case, what is noted
    environment: list[tuple[str, str]]


def write_page(folder: Path) -> Path:
    """
    Raises:
        ConfigError: the folder has no records, or one that cannot be read.
    """
    records = list(records_in(folder).values())
    if not records:
        raise ConfigError(
            f"{folder} holds no records; qurl bench BENCHMARK --out {folder} writes them"
        )
    text = page(
        Path(__file__).with_name("page.html"),
        name="Benchmarks",
        facts=sorted({str(record.environment.get("cpu", "")) for record in records}),
        parts=[part_of(record) for record in records],
        caption=CAPTION,
        heads=HEADS,
        cells=cells,
    )
    path = folder / PAGE
    with refusing(path, key="--out"):
        write_whole(path, text)
    return path


def part_of(record: BenchRecord) -> DrawnRecord:
    bars = chart(record.cases)
    environment = record.environment
    facts = [
        record.started,
        *(gpu["name"] for gpu in environment.get("gpus", [])),
        f"{environment.get('cores')} cores, {', '.join(environment.get('instructions', []))}",
        f"commit {environment.get('commit')}",
        *beside(environment),
    ]
    return DrawnRecord(
        record=record,
        title=f"{bars[0].figure.name}, {bars[0].figure.unit}" if bars else "",
        facts=facts,
        svg=chart_svg(bars, record.benchmark) if bars else "",
        legend=list({bar.series: bar.color for bar in bars}.items()),
        notes=[
            (case.name, "; ".join(f"{key}: {value}" for key, value in case.notes.items()))
            for case in record.cases
            if case.notes
        ],
        environment=[(key, _told(value)) for key, value in environment.items()],
    )


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_told(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_told, value)) or "none"
    return str(value)


@dataclass(frozen=True)
class Bar:
    """One case in the picture."""

    group: str  # bars side by side
    series: str  # a colour
    color: str
    figure: Figure
    valid: bool


def chart(cases: Sequence[Case]) -> list[Bar]:
    """The first figure of each case, and those of its kind, by what colour and group tell apart."""
    cases = [case for case in cases if case.figures]
    if not cases:
        return []
    headline = cases[0].figures[0]
    differing = [
        key for key in cases[0].keys if len({str(case.keys.get(key)) for case in cases}) > 1
    ]
    series = next((key for key in SERIES if key in differing), "")
    labels = list(dict.fromkeys(str(case.keys.get(series, "")) for case in cases))
    bars = []
    for case in cases:
        found = [f for f in case.figures if (f.name, f.unit) == (headline.name, headline.unit)]
        label = str(case.keys.get(series, ""))
        rest = [key for key in differing if key != series]
        for figure in found:
            bars.append(
                Bar(
                    group=", ".join(_label(key, case.keys.get(key)) for key in rest),
                    series=label or headline.name,
                    color=PALETTE[labels.index(label) % len(PALETTE)],
                    figure=figure,
                    valid=not case.reasons,
                )
            )
    return bars


def _label(key: str, value: Any) -> str:
    """A name says what it is; a number needs its key."""
    return value if isinstance(value, str) else f"{key.replace('_', ' ')} {value}"


def chart_svg(bars: Sequence[Bar], key: str) -> str:
    """An ``<svg>`` element for a page that defines ``COLORS`` as CSS variables."""
    groups = list(dict.fromkeys(bar.group for bar in bars))
    rows = [groups[start : start + GROUPS] for start in range(0, len(groups), GROUPS)]
    width, height = 1094, 260 * len(rows)
    heights = [bar.figure.median for bar in bars]
    log = min(heights) > 0 and max(heights) / min(heights) > LOG
    with matplotlib.rc_context(STYLE):
        drawing = Drawing(figsize=(width / 72, height / 72), dpi=72)
        FigureCanvasAgg(drawing)
        drawing.patch.set_visible(False)
        members = {group: [bar for bar in bars if bar.group == group] for group in groups}
        # Groups have equal room, for their labels, and bars equal widths.
        bar_width = FILLED / max(map(len, members.values()))
        for number_of_row, row in enumerate(rows):
            bottom = 1 - (number_of_row + 1) / len(rows)
            axes = drawing.add_axes(
                (64 / width, bottom + 46 / height, 1 - 72 / width, 200 / height)
            )
            _draw_row(axes, [members[group] for group in row], bar_width)
            axes.set_xlim(-0.5, len(rows[0]) - 0.5)
            axes.set_yscale("log" if log else "linear")
            axes.set_ylim(0.7 * min(heights) if log else 0, 1.1 * max(map(_top, bars)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
        file = io.StringIO()
        drawing.savefig(file, format="svg", metadata={"Date": None})
    name = "; ".join(
        f"{bar.group} {bar.series}: {number(bar.figure.median)} {bar.figure.unit}" for bar in bars
    )
    return for_html(file.getvalue(), key, name)


def _draw_row(axes: Axes, groups: Sequence[Sequence[Bar]], bar_width: float) -> None:
    for middle, group in enumerate(groups):
        for index, bar in enumerate(group):
            _draw(axes, bar, middle + (index - (len(group) - 1) / 2) * bar_width, 0.9 * bar_width)
    labels = [textwrap.fill(group[0].group, 150 // GROUPS) for group in groups]
    axes.set_xticks(range(len(groups)), labels)
    axes.tick_params(length=0)
    axes.patch.set_visible(False)
    axes.grid(axis="y", color=COLORS["rule"], linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)


def _top(bar: Bar) -> float:
    """The highest thing that is drawn of it; a limit far above it is left outside."""
    figure = bar.figure
    marks = [mark for mark in (figure.limit, figure.predicted) if mark is not None]
    return max(_middle_half(figure)[1], *(m for m in marks if m < 2 * figure.median), 0.0)


def _middle_half(figure: Figure) -> tuple[float, float]:
    if len(figure.repeats) < 2:
        return figure.median, figure.median
    low, _, high = statistics.quantiles(figure.repeats, n=4, method="inclusive")
    return low, high


def _draw(axes: Axes, bar: Bar, place: float, width: float) -> None:
    figure, color = bar.figure, COLORS[bar.color]
    alpha = 1.0 if bar.valid else 0.35
    axes.bar(place, figure.median, width, color=color, alpha=alpha, linewidth=0)
    ink = COLORS["ink"]
    if len(figure.repeats) > 1:
        axes.plot([place, place], _middle_half(figure), color=ink, linewidth=1)
    if figure.limit is not None:
        span = [place - width / 2, place + width / 2]
        axes.plot(span, [figure.limit] * 2, color=ink, linewidth=1.4, clip_on=True)
    if figure.predicted is not None:
        style: dict[str, Any] = dict(marker="o", ms=6, mfc=COLORS["paper"])
        axes.plot([place], [figure.predicted], color=ink, linestyle="none", **style)
