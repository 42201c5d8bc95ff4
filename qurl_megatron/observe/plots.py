"""The pictures of a run, after the paper's Figures 2, 3, 4 and 9.

A ``Picture`` is data: which metrics, on which scale, and how to read it. ``picture_svg`` draws one
for the report, where title, legend and caption are HTML around it; ``render_figure`` draws several
into one image that stands alone. Figures are made without pyplot, so nothing here is global.

SVG text stays text, and colours become CSS variables: the page decides on font and theme.
"""

import html
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from matplotlib.typing import RcKeyType

from qurl_megatron.observe.catalogue import unit
from qurl_megatron.observe.sinks import Record
from qurl_megatron.observe.text import MINUS, NARROW_SPACE, power_of_ten, reading

COLORS = {  # Okabe and Ito's palette, which colour-blind readers tell apart, darkened for lines
    "blue": "#0072b2",
    "orange": "#d55e00",
    "green": "#00896a",
    "purple": "#a2527f",
    "yellow": "#c08300",
    "ink": "#1d2126",
    "muted": "#646b76",
    "rule": "#e3e5e9",
    "other": "#c6cad1",
    "paper": "#fdfdfc",
}
"""Light theme; ``report.css`` has the same names with a dark variant each."""

PHASES = {  # in the order in which a step runs through them
    "rollout": "blue",
    "reward": "purple",
    "score": "green",
    "train": "orange",
    "publish": "yellow",
}

MAX_POINTS = 160  # a longer series is thinned; keeps the page small and the picture clear
MAX_BARS = 60
STYLE: dict[RcKeyType, Any] = {
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


@dataclass(frozen=True)
class Line:
    """One metric in a picture."""

    metric: str
    label: str
    color: str
    rings: bool = False
    """Draw every point as a ring, for a metric that is measured at few steps."""


def draw_lines(axes: Axes, picture: "Picture", history: History) -> None:
    """A smoothed line over the faint measured points, for each metric."""
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
        style: dict[str, Any] = dict(marker="o", markersize=6.5, markerfacecolor=COLORS["paper"])
        axes.plot(steps, values, color=color, lw=1.2, mew=1.8, zorder=4, **style)
        return
    smoothed = smooth(values, log=log)
    if smoothed is not values:
        _draw_measured(axes, steps, values, color)
    dot = "o" if len(steps) == 1 else None
    axes.plot(*thin(steps, smoothed), color=color, lw=1.9, marker=dot, zorder=3)


def _draw_measured(axes: Axes, steps: np.ndarray, values: np.ndarray, color: str) -> None:
    """Faint points; in a long run, the band from the lowest to the highest of each stretch."""
    if len(steps) <= MAX_POINTS:
        style: dict[str, Any] = dict(
            marker="o", markersize=3.6, markeredgewidth=0, linestyle="none"
        )
        axes.plot(steps, values, color=color, alpha=0.34, zorder=2, **style)
        return
    starts = _stretches(len(steps), MAX_POINTS)
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    centers = _means(steps, starts)
    axes.fill_between(centers, low, high, color=color, alpha=0.16, linewidth=0, zorder=2)


def draw_phases(axes: Axes, picture: "Picture", history: History) -> None:
    """The seconds of each phase stacked up to those of the step; what is in no phase is on top."""
    lines = picture.present(history)
    steps = np.unique(np.concatenate([history.series(line.metric)[0] for line in lines]))
    stack = np.zeros((len(lines), len(steps)))
    for row, line in zip(stack, lines, strict=True):
        at, values = history.series(line.metric)
        row[np.searchsorted(steps, at)] = values
    colors = [COLORS[line.color] for line in lines]
    if "time/step" in history:
        at, whole = history.series("time/step")
        inside = np.isin(at, steps)
        other = np.zeros(len(steps))
        other[np.searchsorted(steps, at[inside])] = whole[inside]
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


@dataclass(frozen=True)
class Picture:
    """Metrics that belong into one frame, and how to read them."""

    key: str
    title: str
    lines: tuple[Line, ...]
    caption: str
    paper: str = ""
    """What it corresponds to in the paper, e.g. "Fig. 2 (b)"."""

    log: bool = False
    from_zero: bool = True
    wide: bool = False
    """Spans both columns of the report."""

    draw: Callable[[Axes, "Picture", History], None] = draw_lines

    def present(self, history: History) -> list[Line]:
        """The lines that this run has something to show for."""
        return [line for line in self.lines if self._drawable(line, history)]

    def _drawable(self, line: Line, history: History) -> bool:
        if line.metric not in history:
            return False
        return not self.log or bool((history.series(line.metric)[1] > 0).any())


SECTIONS: dict[str, tuple[Picture, ...]] = {
    "Learning": (
        Picture(
            "reward",
            "Reward",
            (
                Line("reward/mean", "rollout reward", "blue"),
                Line("eval/accuracy", "held-out accuracy", "orange", rings=True),
                Line("eval/reward", "held-out reward", "orange", rings=True),
            ),
            "Mean reward of each rollout batch, sampled by the quantized policy. Rings: held-out "
            "prompts; the first one is the model before training. A line ends where other data or "
            "another reward makes a new scale.",
            "Fig. 2 (a)",
            wide=True,
        ),
        Picture(
            "clip",
            "Clipped tokens",
            (Line("policy/clip_fraction", "clip fraction", "blue"),),
            "Share of tokens that clipping cuts off from the update. Under Eq. 3 the paper sees it "
            "climb to 1.5 % and then drop to zero as training breaks; low and steady is healthy.",
            "Fig. 2 (b)",
        ),
        Picture(
            "acr",
            "Adaptive clip range",
            (
                Line("acr/active_fraction", "active", "blue"),
                Line("acr/rescued_fraction", "rescued", "orange"),
            ),
            "Active: tokens whose upper bound is widened, since their importance weight is "
            "truncated. Rescued: those that TIS (Eq. 5) would have clipped and ACR lets through.",
            "Eq. 9",
        ),
        Picture(
            "groups",
            "Groups of answers",
            (
                Line("sampling/kept_fraction", "mixed", "blue"),
                Line("sampling/all_right_fraction", "all right", "green"),
                Line("sampling/all_wrong_fraction", "all wrong", "orange"),
            ),
            "Of all groups that were generated. Dynamic sampling trains on the mixed ones alone: "
            "where all answers are right, or all wrong, none is better than another.",
        ),
    ),
    "Critic": (
        Picture(
            "values",
            "Values and returns",
            (
                Line("critic/value_mean", "mean value", "blue"),
                Line("critic/return_mean", "mean return", "orange"),
            ),
            "What the critic expected of the tokens, and what came. It begins at 0.",
            from_zero=False,
        ),
        Picture(
            "explained_variance",
            "Explained variance",
            (Line("critic/explained_variance", "share", "blue"),),
            "Of the returns, by the values before the update: 1 is perfect, 0 no better "
            "than their mean, below 0 worse.",
            from_zero=False,
        ),
        Picture(
            "critic_loss",
            "Critic loss",
            (Line("critic/loss", "mean over updates", "blue"),),
            "Half the squared error of the values, the worse of clipped and unclipped.",
        ),
    ),
    "Quantization gap": (
        Picture(
            "kl",
            "KL of behaviour from proximal policy",
            (Line("rollout/kl_k1", "k1", "blue"), Line("rollout/kl_k3", "k3", "orange")),
            "How far the quantized policy that samples is from the full-precision one that trains, "
            "per token. In the paper it grows from 0.002 to 0.025 before training collapses.",
            "Figs. 3 (a), 4 (b)",
        ),
        Picture(
            "rho_max",
            "Largest probability ratio",
            (Line("rollout/rho_max", "max ρ", "blue"),),
            "The most extreme token of each batch: proximal over behaviour probability, log scale. "
            "The paper sees up to 10⁵; the cap C keeps such a token from ruling the gradient.",
            "Fig. 3 (b)",
            log=True,
        ),
        Picture(
            "weights",
            "Importance weights",
            (
                Line("rollout/rho_mean", "mean ρ", "blue"),
                Line("rollout/ess", "effective sample size", "orange"),
            ),
            "Mean ratio, 1 in expectation, and the share of tokens that stay effective under their "
            "weights. Both drift away from 1 as the two policies part.",
            from_zero=False,
        ),
        Picture(
            "truncated_weights",
            "Truncated weights",
            (Line("rollout/truncated_weight_fraction", "share above C", "blue"),),
            "Share of tokens with ρ above C. Their weight is cut to C, which bounds the variance "
            "and costs some bias.",
            "Eq. 5",
        ),
        Picture(
            "dropped",
            "Tokens left out",
            (
                Line("correction/rejected_fraction", "in rejected responses", "blue"),
                Line("correction/banded_fraction", "outside IcePop's band", "orange"),
            ),
            "Tokens that train nothing because behaviour and proximal policy disagree too much, by "
            "the settings of the correction section.",
        ),
        Picture(
            "flips",
            "Code flips",
            (Line("quant/code_flip_rate", "codes changed", "blue"),),
            "Share of quantized weights whose code changed with the step. At zero, the engine "
            "samples from the same policy however much the trainer learns. A small share is not "
            "yet a frozen engine: see how much of the update reaches it.",
            "Fig. 4 (a)",
        ),
        Picture(
            "weight_change",
            "Weight update and quantization error",
            (
                Line("quant/weight_error", "error, Eq. 14", "orange"),
                Line("quant/weight_update", "update, Eq. 13", "blue"),
            ),
            "Both squared and relative to the weights, log scale. The wider the gap, the rarer a "
            "weight reaches its next grid point, and the noisier each update arrives; a larger "
            "learning rate narrows it, and so does a larger UAQ factor s.",
            "Fig. 9",
            log=True,
        ),
        Picture(
            "update_passed",
            "Update that reaches the engine",
            (
                Line("quant/update_passed", "share of the update", "blue"),
                Line("quant/update_cosine", "cosine", "orange"),
            ),
            "⟨ΔQ, ΔW⟩ / ‖ΔW‖² and the cosine, of the update ΔW of a step and the change ΔQ of the "
            "quantized weights. A share near 1 with a small cosine is an update that arrives whole "
            "but noisy; a share near 0 is a frozen engine.",
        ),
    ),
    "Policy and optimizer": (
        Picture(
            "entropy",
            "Entropy",
            (Line("policy/entropy", "per token, in nats", "blue"),),
            "Spread of the next-token distribution. A slow fall is learning; a fall to zero ends "
            "exploration, a steep rise precedes many a collapse.",
        ),
        Picture(
            "length",
            "Response length",
            (Line("response/length", "mean tokens", "blue"),),
            "Mean tokens per response, those cut off by the length limit included.",
        ),
        Picture(
            "truncated",
            "Cut-off responses",
            (Line("response/truncated", "share", "blue"),),
            "Share of responses that the length limit ended. They rarely earn a reward, so this "
            "bounds the reward from above.",
        ),
        Picture(
            "grad_norm",
            "Gradient norm",
            (Line("optimizer/grad_norm", "before clipping", "blue"),),
            "Global norm of the gradient. Spikes that coincide with a large ratio above point to "
            "importance weights, others to the data.",
        ),
        Picture(
            "reference_kl",
            "KL to the reference policy",
            (Line("reference/kl", "by algo.kl_estimator", "blue"),),
            "Distance travelled from the policy that training began with, per token.",
        ),
    ),
    "Time": (
        Picture(
            "phases",
            "Seconds per step",
            tuple(Line(f"time/{name}", name, color) for name, color in PHASES.items()),
            "Where a step spends its time; grey is in no phase. Publishing is the price of fresh "
            "weights, scoring that of the correction; both should stay thin beside the rollout.",
            draw=draw_phases,
        ),
        Picture(
            "throughput",
            "Throughput",
            (
                Line("throughput/rollout_tokens_per_s", "rollout tokens/s", "blue"),
                Line("throughput/train_tokens_per_s", "training tokens/s", "orange"),
            ),
            "Tokens generated per second of rollout, and tokens trained on per second of training.",
            "Fig. 8",
        ),
        Picture(
            "padding",
            "Padding",
            (Line("train/padding_fraction", "share of positions", "blue"),),
            "Positions of forward and backward passes that hold no token. train.max_tokens brings "
            "responses of like length together, train.packed lays them end to end.",
        ),
    ),
    "Fleet": (
        Picture(
            "serving",
            "Engines serving",
            (
                Line("fleet/serving", "serving", "green"),
                Line("fleet/restarts", "restarts", "orange"),
            ),
            "Engines that generated, each confirmed on the current version. One that dies or fails "
            "an update gets no traffic until it has been restarted and has taken in a version.",
        ),
        Picture(
            "update",
            "Seconds to update the engines",
            (
                Line("sync/quantize_s", "quantize", "blue"),
                Line("sync/send_s", "write or send", "green"),
                Line("sync/load_s", "load", "orange"),
                Line("sync/paused_s", "engines paused", "yellow"),
            ),
            "A new version on its way from the optimizer into the engines. The first three "
            "overlap; requests wait while the engines are paused.",
        ),
    ),
}

OVERVIEW = ("reward", "clip", "kl", "rho_max", "flips", "phases")
"""The pictures that sum up a run, for a README."""


def pictures(history: History) -> dict[str, list[Picture]]:
    """The pictures that this run can fill, by section; what was not measured is left out."""
    found = {
        name: [picture for picture in section if picture.present(history)]
        for name, section in SECTIONS.items()
    }
    return {name: section for name, section in found.items() if section}


def render_figure(chosen: Sequence[Picture], history: History, *, columns: int = 2) -> Figure:
    """All of ``chosen`` on one canvas, with titles and legends; they must not be empty."""
    rows = math.ceil(len(chosen) / columns)
    with matplotlib.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.18, h_pad=0.16)
        figure = Figure(
            figsize=(6.2 * columns, 3.4 * rows), facecolor=COLORS["paper"], layout=layout
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
        steps, values = history.newest(line.metric)
        first, last = reading(line.metric, values[0]), reading(line.metric, values[-1])
        parts.append(
            f"{line.label}{history.since(line.metric)}: {first} at step {steps[0]}, "
            f"{last} at step {steps[-1]}, largest {reading(line.metric, values.max())}"
        )
    return "; ".join(parts)


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

    Up to 8 points come back as they are. On a log scale the average is geometric.
    """
    if len(values) <= 8:
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
    picture.draw(axes, picture, history)
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
    box, *_ = re.findall(r'viewBox="[^"]*"', svg)
    opening = f'<svg {box} role="img" aria-labelledby="{key}-name">'
    title = f'<title id="{key}-name">{html.escape(name)}</title>'
    return opening + title + svg[svg.index(">") + 1 :]
