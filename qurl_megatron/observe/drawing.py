"""Drawing the pictures of a run: ``picture_url`` draws one for the report, where title, legend and
caption are HTML around it; ``render_figure`` draws several into one image that stands alone.

Figures are made without pyplot, so nothing here is global.
"""

import base64
import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from qurl_megatron.observe.catalogue import unit
from qurl_megatron.observe.history import History, Series
from qurl_megatron.observe.panels import COLORS, Line, Picture
from qurl_megatron.observe.text import MINUS, NARROW_SPACE, power_of_ten

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType  # older releases have none

MAX_POINTS = 160  # of a line; keeps the page small
MEASURED = 8  # points that are drawn as they are; more are smoothed
STYLE: "dict[RcKeyType, Any]" = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "qurl",  # the same run gives the same bytes
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 11,
    "axes.unicode_minus": True,
    "axes.edgecolor": COLORS["rule"],
    "axes.labelcolor": COLORS["muted"],
    "text.color": COLORS["ink"],
    "xtick.color": COLORS["muted"],
    "ytick.color": COLORS["muted"],
}


def render_figure(chosen: Sequence[Picture], history: History, *, columns: int = 2) -> Figure:
    """All of ``chosen`` on one canvas, with titles and legends; they must not be empty."""
    rows = math.ceil(len(chosen) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(
            figsize=(6.2 * columns, 3.4 * rows),
            facecolor=COLORS["paper"],
            layout=ConstrainedLayoutEngine(w_pad=0.18, h_pad=0.16),
        )
        FigureCanvasAgg(figure)
        for index, picture in enumerate(chosen):
            axes = figure.add_subplot(rows, columns, index + 1)
            _draw(axes, picture, history)
            axes.set_title(picture.title, loc="left", fontsize=13, fontweight="bold", pad=24)
            label = None
            for line in picture.present(history):
                label = axes.annotate(
                    f"● {line.label}",
                    (0 if label is None else 1, 1),
                    xytext=(0 if label is None else 14, 7),
                    xycoords="axes fraction" if label is None else (label, "axes fraction"),
                    textcoords="offset points",
                    color=COLORS[line.color],
                    fontsize=10.5,
                    annotation_clip=False,
                )
    return figure


def picture_url(picture: Picture, history: History) -> str:
    """Return a picture as the ``data:`` URL of an SVG file."""
    width, height = 518, 250
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, facecolor=COLORS["paper"])
        # Equal margins line the frames up in the page; an automatic layout is also half the time.
        rectangle = (52 / width, 26 / height, 1 - 56 / width, 1 - 34 / height)
        _draw(figure.add_axes(rectangle), picture, history)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def drawn(picture: Picture, line: Line, history: History) -> Series:
    """Return the newest stretch of a line as it is drawn, so that text can quote its ends."""
    steps, values = history.newest(line.metric)
    if picture.log and (values > 0).any():
        steps, values = steps[values > 0], values[values > 0]
    return steps, values if line.rings else smooth(values, log=picture.log)


def draw_lines(axes: Axes, picture: Picture, history: History) -> None:
    """A smoothed line over the measured points, for each metric."""
    for line in picture.present(history):
        for steps, values in history.stretches(line.metric):
            if picture.log:
                steps, values = steps[values > 0], values[values > 0]
            if len(steps):
                _draw_line(axes, line, steps, values, log=picture.log)
    axes.margins(y=0.1)
    if picture.from_zero and not picture.log:
        low, high = axes.dataLim.intervaly
        axes.set_ylim(min(0.0, 1.12 * low), 1.12 * high if high > 0 else 0.01)


def _draw_line(axes: Axes, line: Line, steps: np.ndarray, values: np.ndarray, *, log: bool) -> None:
    color = COLORS[line.color]
    if line.rings:
        style: dict[str, Any] = dict(marker="o", ms=6.5, mfc=COLORS["paper"])
        axes.plot(steps, values, color=color, lw=1.2, mew=1.8, zorder=4, **style)
        return
    if len(values) > MEASURED:
        _draw_measured(axes, steps, values, color)
    dot = "o" if len(steps) == 1 else None
    axes.plot(*thin(steps, smooth(values, log=log)), color=color, lw=1.9, marker=dot, zorder=3)


def _draw_measured(axes: Axes, steps: np.ndarray, values: np.ndarray, color: str) -> None:
    """Draw a thin line; of a long run, the band from the lowest to the highest of each stretch."""
    if len(steps) <= MAX_POINTS:
        axes.plot(steps, values, color=color, lw=0.8, alpha=0.35, zorder=2)
        return
    starts = np.unique(np.linspace(0, len(steps), MAX_POINTS + 1)[:-1].round().astype(int))
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    axes.fill_between(steps[starts], low, high, color=color, alpha=0.16, linewidth=0, zorder=2)


def smooth(values: np.ndarray, log: bool = False) -> np.ndarray:
    """Gaussian average over neighbouring points: it does not lag behind, as a running one does.

    Up to ``MEASURED`` points come back as they are. On a log scale the average is geometric.
    """
    if len(values) <= MEASURED:
        return values
    sigma = max(1.0, len(values) / 40)
    reach = min(math.ceil(3 * sigma), len(values) - 1)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    inside = slice(reach, reach + len(values))
    level = np.log(values) if log else values
    weight = np.convolve(np.ones(len(values)), kernel)[inside]  # smaller at both ends
    mean = np.convolve(level, kernel)[inside] / weight
    return np.exp(mean) if log else mean


def thin(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return at most ``MAX_POINTS`` points of a smooth curve, both ends among them."""
    if len(values) <= MAX_POINTS:
        return steps, values
    chosen = np.unique(np.linspace(0, len(values) - 1, MAX_POINTS).round().astype(int))
    return steps[chosen], values[chosen]


def _draw(axes: Axes, picture: Picture, history: History) -> None:
    """One frame: alike everywhere, so that pictures can be compared."""
    axes.set_facecolor("none")
    if picture.log:
        axes.set_yscale("log")
    draw_lines(axes, picture, history)
    shares = all(unit(line.metric) == "share" for line in picture.lines)
    frame(axes, history.first_step, history.last_step, shares=shares)


def frame(axes: Axes, first: int, last: int, *, shares: bool) -> None:
    """Grid, ticks and labels of a picture over the steps ``first`` to ``last``, once it is drawn.

    Args:
        shares: the values are shares of 1, labelled as percentages.
    """
    pad = max(0.012 * (last - first), 0.6)
    axes.set_xlim(first - pad, last + pad)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    # In line with the numbers, where it needs no row of its own.
    axes.annotate(
        "step",
        (0, 0),
        xytext=(-6, -8),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="right",
        va="top",
        color=COLORS["muted"],
        fontsize=11,
    )
    _scale_y(axes, shares)
    axes.grid(axis="y", color=COLORS["rule"], linewidth=0.9)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, pad=6, labelsize=11, which="both")
    axes.tick_params(axis="x", pad=8)


def _scale_y(axes: Axes, shares: bool) -> None:
    if axes.get_yscale() != "log":
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(_share_tick if shares else _tick))
        return
    low, high = axes.get_ylim()
    decades = math.log10(high / low)
    subs = (1.0,) if decades > 2.5 else (1.0, 3.0) if decades > 1.2 else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=7))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))


def _tick(value: float, _position: int) -> str:
    value = float(f"{value:.6g}")  # 0.30000000000000004 is 0.3
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return power_of_ten(value)
    if abs(value) >= 1e4:
        return f"{value:,.0f}".replace(",", NARROW_SPACE)
    return f"{value:g}".replace("-", MINUS)


def _share_tick(value: float, position: int) -> str:
    return _tick(100 * value, position) + NARROW_SPACE + "%"
