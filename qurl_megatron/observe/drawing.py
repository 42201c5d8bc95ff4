"""Drawing the pictures of a run: ``picture_svg`` draws one for the report, where title, legend and
caption are HTML around it; ``render_figure`` draws several into one image that stands alone.

Figures are made without pyplot, so nothing here is global. SVG text stays text, and colours become
CSS variables: the page decides on font and theme.
"""

import html
import io
import math
import re
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
from qurl_megatron.observe.text import MINUS, NARROW_SPACE, power_of_ten, reading

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType  # older releases have none

MAX_POINTS = 160  # a longer series is thinned; keeps the page small and the picture clear
MAX_BARS = 60
MEASURED = 8  # points that are drawn as they are; more are smoothed
STYLE: "dict[RcKeyType, Any]" = {
    "svg.fonttype": "none",
    "svg.hashsalt": "qurl",  # the same run gives the same bytes
    "font.family": "DejaVu Sans",  # laid out with it; wider than what the page substitutes
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


def picture_svg(picture: Picture, history: History, *, wide: bool = False) -> str:
    """An ``<svg>`` element to be put into a page that defines ``COLORS`` as CSS variables."""
    width, height = (1094, 280) if wide else (518, 250)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        figure.patch.set_visible(False)
        # Equal margins line the frames up in the page; an automatic layout is also half the time.
        rectangle = (52 / width, 26 / height, 1 - 56 / width, 1 - 34 / height)
        _draw(figure.add_axes(rectangle), picture, history)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    key = f"{picture.key}-wide" if wide else picture.key  # both may stand in one page
    name = f"{picture.title}. {describe(picture, history)}"
    return for_html(file.getvalue(), key, name)


def describe(picture: Picture, history: History) -> str:
    """What the picture shows, in words, for those who do not see it."""
    parts = []
    for line in picture.present(history):
        steps, values = drawn(picture, line, history)
        first, last = reading(line.metric, values[0]), reading(line.metric, values[-1])
        largest = reading(line.metric, history.newest(line.metric)[1].max())
        parts.append(
            f"{line.label}{history.since(line.metric)}: {first} at step {steps[0]:.0f}, "
            f"{last} at step {steps[-1]:.0f}, largest measured {largest}"
        )
    return "; ".join(parts)


def drawn(picture: Picture, line: Line, history: History) -> Series:
    """The newest stretch of a line as the picture draws it, so that text can quote its ends."""
    steps, values = history.newest(line.metric)
    if picture.log and (values > 0).any():
        steps, values = steps[values > 0], values[values > 0]
    if picture.stacked and len(steps) > MAX_BARS:
        starts = _stretches(len(steps), MAX_BARS)
        return _means(steps, starts), _means(values, starts)
    return steps, _course(picture, line, values)


def _course(picture: Picture, line: Line, values: np.ndarray) -> np.ndarray:
    """What a line goes through."""
    as_measured = line.rings or picture.stacked
    return values if as_measured else smooth(values, log=picture.log)


def how_drawn(picture: Picture, history: History) -> str:
    """A few words on what was done to the measured values, "" where they are drawn as they are."""
    lengths = [
        len(history.newest(line.metric)[0]) for line in picture.present(history) if not line.rings
    ]
    longest = max(lengths, default=0)
    if picture.stacked:
        return "means of neighbouring steps" if longest > MAX_BARS else ""
    if longest <= MEASURED:
        return ""
    return "line smoothed, " + ("dots as measured" if longest <= MAX_POINTS else "band as measured")


def draw_lines(axes: Axes, picture: Picture, history: History) -> None:
    """A smoothed line over the measured points, for each metric."""
    for line in picture.present(history):
        for steps, values in history.stretches(line.metric):
            if picture.log:
                steps, values = steps[values > 0], values[values > 0]
            if len(steps):
                _draw_line(axes, line, steps, values, _course(picture, line, values))
    axes.margins(y=0.1)
    if picture.from_zero and not picture.log:
        low, high = axes.dataLim.intervaly
        axes.set_ylim(min(0.0, 1.12 * low), 1.12 * high if high > 0 else 0.01)


def _draw_line(
    axes: Axes, line: Line, steps: np.ndarray, values: np.ndarray, course: np.ndarray
) -> None:
    color = COLORS[line.color]
    if line.rings:
        style: dict[str, Any] = dict(marker="o", ms=6.5, mfc=COLORS["paper"])
        axes.plot(steps, values, color=color, lw=1.2, mew=1.8, zorder=4, **style)
        return
    if course is not values:
        _draw_measured(axes, steps, values, color)
    dot = "o" if len(steps) == 1 else None
    axes.plot(*thin(steps, course), color=color, lw=1.9, marker=dot, zorder=3)


def _draw_measured(axes: Axes, steps: np.ndarray, values: np.ndarray, color: str) -> None:
    """Points; in a long run, the band from the lowest to the highest of each stretch."""
    if len(steps) <= MAX_POINTS:
        style: dict[str, Any] = dict(marker="o", ms=4.4, mew=0, ls="none")
        axes.plot(steps, values, color=color, alpha=0.75, zorder=2, **style)
        return
    starts = _stretches(len(steps), MAX_POINTS)
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    centers = _means(steps, starts)
    axes.fill_between(centers, low, high, color=color, alpha=0.16, linewidth=0, zorder=2)


def _draw_phases(axes: Axes, picture: Picture, history: History) -> None:
    """The seconds of each phase stacked up to those of the step; what is in no phase is on top."""
    lines = picture.present(history)
    steps = np.unique(np.concatenate([history.series(line.metric)[0] for line in lines]))
    stack = np.zeros((len(lines), len(steps)))
    for row, line in zip(stack, lines, strict=True):
        at, values = history.series(line.metric)
        row[np.searchsorted(steps, at)] = values
    colors = [COLORS[line.color] for line in lines]
    if "time/step" in history:
        at, step_seconds = history.series("time/step")
        inside = np.isin(at, steps)
        other = np.zeros(len(steps))
        other[np.searchsorted(steps, at[inside])] = step_seconds[inside]
        stack = np.vstack([stack, np.maximum(other - stack.sum(axis=0), 0.0)])
        colors.append(COLORS["other"])
    if len(steps) <= MAX_BARS:
        base = np.zeros(len(steps))
        for heights, color in zip(stack, colors, strict=True):
            axes.bar(steps, heights, 0.8, bottom=base, color=color, linewidth=0, zorder=2)
            base += heights
    else:
        starts = _stretches(len(steps), MAX_BARS)
        means = [_means(row, starts) for row in stack]
        axes.stackplot(_means(steps, starts), means, colors=colors, linewidth=0, zorder=2)
    axes.set_ylim(0, axes.dataLim.y1 * 1.1 or 1)


def sparkline(values: np.ndarray, width: int = 96, height: int = 20) -> str:
    """Points of an SVG polyline that shows the course of ``values``, or "" for less than two."""
    if len(values) < 2:
        return ""
    y = smooth(values)
    x, y = thin(np.arange(len(y)), y)
    low, high = y.min(), y.max()
    # What smoothing leaves of a constant is rounding noise, not a course.
    flat = high - low <= 1e-9 * max(abs(low), abs(high))
    level = np.full(len(y), 0.5) if flat else (y - low) / (high - low)
    x = 1 + (width - 2) * x / x.max()
    return " ".join(
        f"{a:.1f},{b:.1f}" for a, b in zip(x, 2 + (height - 4) * (1 - level), strict=True)
    )


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
    """At most about ``MAX_POINTS`` points of a smooth curve, both ends among them."""
    if len(values) <= MAX_POINTS:
        return steps, values
    chosen = np.unique(np.linspace(0, len(values) - 1, MAX_POINTS).round().astype(int))
    return steps[chosen], values[chosen]


def _stretches(length: int, at_most: int) -> np.ndarray:
    """Where each of ``at_most`` about equally long stretches begins."""
    return np.unique(np.linspace(0, length, min(length, at_most) + 1)[:-1].round().astype(int))


def _means(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    return np.add.reduceat(values.astype(float), starts) / np.diff(np.append(starts, len(values)))


def _draw(axes: Axes, picture: Picture, history: History) -> None:
    """One frame: alike everywhere, so that pictures can be compared."""
    axes.set_facecolor("none")
    if picture.log:
        axes.set_yscale("log")
    (_draw_phases if picture.stacked else draw_lines)(axes, picture, history)
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


def for_html(svg: str, key: str, name: str) -> str:
    """Strip what only a stand-alone file needs, and hand fonts and colours over to the page."""
    svg = svg[svg.index("<svg") :]
    # matplotlib's <style> would apply to the whole page.
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r"<!--.*?-->|font-family: [^;\"]*;? ?", "", svg, flags=re.S)
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", svg)
    # Hundredths of a pixel are enough; only within attributes, since tick labels are text.
    svg = re.sub(r'"[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), svg)
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    # One style for all points of a series instead of one each.
    svg = re.sub(r'(<g clip-path="[^"]*")>(\s*<use [^>]*?)( style="[^"]*")', r"\1\3>\2", svg)
    svg = re.sub(r'(<use [^>]*?) style="[^"]*"', r"\1", svg)
    # Several drawings share a page: ids in use get a prefix, the others go.
    used = set(re.findall(r"#([\w.-]+)", svg))
    svg = re.sub(
        r' id="([\w.-]+)"',
        lambda match: f' id="{key}-{match[1]}"' if match[1] in used else "",
        svg,
    )
    svg = re.sub(r'url\(#|(?:xlink:)?href="#', rf"\g<0>{key}-", svg)
    svg = svg.replace("xlink:href", "href")
    for color, value in COLORS.items():
        svg = svg.replace(value, f"var(--{color})")
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None, "matplotlib says how large its drawing is"
    opening = f'<svg {box[0]} role="img" aria-labelledby="{key}-name">'
    title = f'<title id="{key}-name">{html.escape(name)}</title>'
    return opening + title + svg[svg.index(">") + 1 :]
