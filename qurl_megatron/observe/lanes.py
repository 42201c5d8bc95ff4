"""The timeline of a run's last steps: what engines and trainer did at the same time, in lanes."""

import io
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from qurl_megatron.observe.drawing import STYLE, for_html
from qurl_megatron.observe.panels import COLORS, PHASES
from qurl_megatron.observe.text import duration
from qurl_megatron.observe.timeline import Span, overlap

STEPS = 6  # that the picture shows, the newest
LANES = ("engines", "update", "trainer")  # from the top
LABELS = {"engines": "Engines", "update": "Update", "trainer": "Trainer"}
CAPTION = (
    "What happened at the same time, over the last steps. Engines: the batches in flight, each "
    "with the number of the step that trains on it; where several overlap they have rows of their "
    "own. Update: a new version on its way into the paused engines. Trainer: its phases; rollout "
    "is the time it waited for samples."
)


def recent(spans: Iterable[Span], steps: int = STEPS) -> list[Span]:
    """The spans of the newest ``steps`` trained steps, and what ran beside them."""
    spans = [span for span in spans if span.lane in LANES and span.end > span.start]
    trained = sorted({span.step for span in spans if span.name == "train"})[-steps:]
    if not trained:
        return []
    shown = [s for s in spans if s.lane == "trainer" and s.step in trained]
    begin, end = min(s.start for s in shown), max(s.end for s in shown)
    return [s for s in spans if s.end > begin and s.start < end]


def lanes_svg(spans: Sequence[Span]) -> str:
    """An ``<svg>`` element for the report; ``spans`` come from ``recent`` and are not empty."""
    begin, end = min(s.start for s in spans), max(s.end for s in spans)
    rows = [(lane, row) for lane in LANES for row in _rows([s for s in spans if s.lane == lane])]
    width, height = 1094, 64 + 34 * len(rows)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        FigureCanvasAgg(figure)
        figure.patch.set_visible(False)
        axes = figure.add_axes((76 / width, 30 / height, 1 - 84 / width, 1 - 36 / height))
        for place, (_, row) in enumerate(rows):
            for span in row:
                _bar(axes, span, place, begin, width / max(end - begin, 1e-9))
        axes.set_xlim(0, end - begin)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        lanes = [lane for lane, _ in rows]
        first = [lanes.index(lane) for lane in dict.fromkeys(lanes)]
        axes.set_yticks(first, [LABELS[lanes[place]] for place in first])
        axes.tick_params(length=0)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g} s"))
        axes.patch.set_visible(False)
        for side in ("top", "left", "right"):
            axes.spines[side].set_visible(False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    name = (
        f"Timeline of {duration(end - begin)}; {overlap(spans):.0%} of the rollouts' time lies "
        "behind other work of the trainer"
    )
    return for_html(file.getvalue(), "timeline", name)


def _bar(axes: Axes, span: Span, place: int, begin: float, pixels_per_s: float) -> None:
    color = COLORS[PHASES.get(span.name, "other")]
    start, length = span.start - begin, span.end - span.start
    axes.barh(place, length, 0.7, left=start, color=color, linewidth=0, zorder=2)
    label = str(span.step) if span.lane == "engines" else span.name
    if length * pixels_per_s > 8 * len(label) + 8:
        middle = start + length / 2
        style: dict[str, Any] = dict(
            ha="center", va="center", color=COLORS["paper"], fontsize=10, clip_on=True
        )
        axes.text(middle, place, label, **style)


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans in as few rows as possible without overlaps in a row."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: s.start):
        free = next((row for row in rows if row[-1].end <= span.start + 1e-3), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows
