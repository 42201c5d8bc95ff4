"""The pictures of a run, after the paper's Figures 2, 3, 4 and 9: which metrics, on which scale,
how to read them, and how they are drawn. TensorBoard has the curves of all other metrics.

Figures are made without pyplot, so nothing here is global.
"""

import base64
import io
import math
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, PercentFormatter

from qurl_megatron.observe.catalogue import known
from qurl_megatron.observe.metrics import History
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
    "paper": "#fdfdfc",
}
"""``report.css`` has the same names, with a dark variant each for the page around pictures."""

WIDTH, HEIGHT = 518, 250  # of a picture in the report, in points
MEASURED = 8  # points that are drawn as they are; more are smoothed
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "qurl",  # the same run gives the same bytes
    "font.size": 11,
    "axes.edgecolor": COLORS["rule"],
    "text.color": COLORS["ink"],
    "xtick.color": COLORS["muted"],
    "ytick.color": COLORS["muted"],
}


@dataclass(frozen=True)
class Line:
    """One metric in a picture."""

    metric: str
    label: str
    color: str
    rings: bool = False
    """Draw every point as a ring, for a metric that is measured at few steps."""


@dataclass(frozen=True)
class Picture:
    """Metrics that belong into one frame, and how to read them."""

    title: str  # with the paper's figure, where it has one
    lines: tuple[Line, ...]
    caption: str
    log: bool = False


SECTIONS: dict[str, dict[str, Picture]] = {
    "Learning": {
        "reward": Picture(
            "Reward (Fig. 2 a)",
            (
                Line("reward/mean", "rollout reward", "blue"),
                Line("eval/accuracy", "held-out accuracy", "orange", rings=True),
                Line("eval/reward", "held-out reward", "orange", rings=True),
            ),
            "Mean reward of each rollout batch, sampled by the quantized policy. Rings: held-out "
            "prompts; the first one is the model before training.",
        ),
        "clip": Picture(
            "Clipped tokens (Fig. 2 b)",
            (Line("policy/clip_fraction", "clip fraction", "blue"),),
            "Share of tokens that clipping cuts off from the update. Under Eq. 3 the paper sees it "
            "climb to 1.5 % and then drop to zero as training breaks; low and steady is healthy.",
        ),
        "length": Picture(
            "Response length",
            (Line("response/length", "mean tokens", "blue"),),
            "Mean tokens per response, those cut off by the length limit included.",
        ),
        "entropy": Picture(
            "Entropy",
            (Line("policy/entropy", "per token, in nats", "blue"),),
            "Spread of the next-token distribution. A slow fall is learning; a fall to zero ends "
            "exploration, a steep rise precedes many a collapse.",
        ),
        "grad_norm": Picture(
            "Gradient norm",
            (Line("optimizer/grad_norm", "before clipping", "blue"),),
            "Global norm of the gradient. Spikes that coincide with a large ratio below point to "
            "importance weights, others to the data.",
        ),
    },
    "Quantization gap": {
        "kl": Picture(
            "KL of behaviour from proximal policy (Figs. 3 a, 4 b)",
            (Line("rollout/kl_k3", "k3", "blue"),),
            "How far the quantized policy that samples is from the full-precision one that trains, "
            "per token, by the estimator k3 (ρ − 1 − log ρ, which is never negative). In the paper "
            "it grows from 0.002 to 0.025 before training collapses.",
        ),
        "rho_max": Picture(
            "Largest probability ratio (Fig. 3 b)",
            (Line("rollout/rho_max", "max ρ", "blue"),),
            "The most extreme token of each batch: proximal over behaviour probability, log scale. "
            "The paper sees up to 10⁵; the cap C keeps such a token from ruling the gradient.",
            log=True,
        ),
        "acr": Picture(
            "Truncated weights and ACR (Eqs. 5, 9)",
            (
                Line("rollout/truncated_weight_fraction", "weight above C", "green"),
                Line("acr/active_fraction", "ACR active", "blue"),
                Line("acr/rescued_fraction", "rescued", "orange"),
            ),
            "Tokens with ρ above C, whose weight is cut to C (Eq. 5). Active: those of them whose "
            "upper clip bound ACR widens. Rescued: those that TIS would have clipped and ACR lets "
            "through.",
        ),
        "flips": Picture(
            "Code flips (Fig. 4 a)",
            (Line("quant/code_flip_rate", "codes changed", "blue"),),
            "Share of quantized weights whose code changed with the step. At zero, the engine "
            "samples from the same policy however much the trainer learns. A small share is not "
            "yet a frozen engine: quant/update_passed says how much of the update reaches it.",
        ),
        "weight_change": Picture(
            "Weight update and quantization error (Fig. 9)",
            (
                Line("quant/weight_error", "error, Eq. 14", "orange"),
                Line("quant/weight_update", "update, Eq. 13", "blue"),
            ),
            "Both squared and relative to the weights, log scale. The wider the gap, the rarer a "
            "weight reaches its next grid point, and the noisier each update arrives; a larger "
            "learning rate narrows it, and so does a larger UAQ factor s.",
            log=True,
        ),
    },
    "Time": {
        "phases": Picture(
            "Seconds per step",
            (
                Line("time/rollout", "rollout", "blue"),
                Line("time/reward", "reward", "purple"),
                Line("time/score", "score", "green"),
                Line("time/train", "train", "orange"),
                Line("time/publish", "publish", "yellow"),
            ),
            "Where a step spends its time. Publishing is the price of fresh weights, scoring the "
            "price of the correction; both should stay small beside the rollout.",
        ),
        "throughput": Picture(
            "Throughput",
            (
                Line("throughput/rollout_tokens_per_s", "rollout tokens/s", "blue"),
                Line("throughput/train_tokens_per_s", "training tokens/s", "orange"),
            ),
            "Tokens generated per second of rollout, and tokens trained on per second of training.",
        ),
    },
}


def drawn_sections(history: History) -> dict[str, list[tuple[str, Picture, str, list]]]:
    """Return the pictures that this run can fill, by section: of each its key, the picture, the
    ``data:`` URL of an SVG file, and its legend, the lines with the values at their ends."""
    sections: dict[str, list[tuple[str, Picture, str, list]]] = {}
    for title, pictures in SECTIONS.items():
        for key, picture in pictures.items():
            url, ends = _svg(picture, history)
            legend = [(line, reading(line.metric, values[-1])) for line, values in ends]
            if legend:
                sections.setdefault(title, []).append((key, picture, url, legend))
    return sections


def _svg(picture: Picture, history: History) -> tuple[str, list[tuple[Line, np.ndarray]]]:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72, facecolor=COLORS["paper"])
        # Equal margins line the frames up in the page; an automatic layout is also half the time.
        axes = figure.add_axes((52 / WIDTH, 26 / HEIGHT, 1 - 56 / WIDTH, 1 - 34 / HEIGHT))
        ends = draw(axes, picture, history)
        file = io.BytesIO()
        if ends:
            figure.savefig(file, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}", ends


def draw(axes: Axes, picture: Picture, history: History) -> list[tuple[Line, np.ndarray]]:
    """Draw a smoothed line over the measured points of each metric of a picture.

    Returns:
        The lines that were drawn, each with its values, so that text can quote its end.
    """
    axes.set_facecolor("none")
    if picture.log:
        axes.set_yscale("log")
    ends = []
    for line in picture.lines:
        if line.metric not in history:
            continue
        steps, values = history[line.metric]
        if picture.log:
            steps, values = steps[values > 0], values[values > 0]
        if len(steps):
            ends.append((line, _draw_line(axes, line, steps, values, log=picture.log)))
    if not ends:
        return []
    axes.margins(y=0.1)
    if not picture.log:
        low, high = axes.dataLim.intervaly
        axes.set_ylim(min(0.0, 1.12 * low), 1.12 * high if high > 0 else 0.01)
    shares = all(known(line.metric).unit == "share" for line in picture.lines)
    frame(axes, history.first_step, history.last_step, shares=shares)
    return ends


def _draw_line(
    axes: Axes, line: Line, steps: np.ndarray, values: np.ndarray, *, log: bool
) -> np.ndarray:
    color = COLORS[line.color]
    if line.rings:
        style: dict[str, Any] = dict(marker="o", ms=6.5, mfc=COLORS["paper"])
        axes.plot(steps, values, color=color, lw=1.2, mew=1.8, zorder=4, **style)
        return values
    if len(values) > MEASURED:
        axes.plot(steps, values, color=color, lw=0.8, alpha=0.35, zorder=2)
    smoothed = smooth(values, log=log)
    dot = "o" if len(steps) == 1 else None
    axes.plot(steps, smoothed, color=color, lw=1.9, marker=dot, zorder=3)
    return smoothed


def smooth(values: np.ndarray, log: bool = False) -> np.ndarray:
    """Return Gaussian averages over neighbouring points; unlike running ones they do not lag.

    Up to ``MEASURED`` points come back as they are. On a log scale the average is geometric.
    """
    if len(values) <= MEASURED:
        return values
    if log:
        return np.exp(smooth(np.log(values)))
    sigma = max(1.0, len(values) / 40)
    reach = round(3 * sigma)
    gaussian = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    weight = np.convolve(np.ones(len(values)), gaussian, "same")  # smaller at both ends
    return np.convolve(values, gaussian, "same") / weight


def frame(axes: Axes, first: int, last: int, *, shares: bool) -> None:
    """Add grid, ticks and labels to a drawn picture of steps; ``shares`` become percentages."""
    pad = max(0.012 * (last - first), 0.6)
    axes.set_xlim(first - pad, last + pad)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    # In line with the numbers, where it needs no row of its own.
    label: dict[str, Any] = dict(transform=axes.transAxes, ha="right", va="top")
    axes.text(-0.012, -0.045, "step", color=COLORS["muted"], **label)
    _scale_y(axes, shares)
    axes.grid(axis="y", color=COLORS["rule"], linewidth=0.9)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, pad=6, labelsize=11, which="both")
    axes.tick_params(axis="x", pad=8)


def _scale_y(axes: Axes, shares: bool) -> None:
    if axes.get_yscale() != "log":
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
        percent = PercentFormatter(1.0, symbol=f"{NARROW_SPACE}%")
        axes.yaxis.set_major_formatter(percent if shares else FuncFormatter(_tick))
        return
    low, high = axes.get_ylim()
    decades = math.log10(high / low)
    labelled: tuple[float, ...] = (1.0, 2.0, 5.0)
    if decades > 2.5:
        labelled = (1.0,)
    elif decades > 1.2:
        labelled = (1.0, 3.0)
    axes.yaxis.set_major_locator(LogLocator(subs=labelled, numticks=7))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))


def _tick(value: float, _position: int) -> str:
    value = float(f"{value:.6g}")  # 0.30000000000000004 is 0.3
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return power_of_ten(value)
    if abs(value) >= 1e4:
        return f"{value:,.0f}".replace(",", NARROW_SPACE)
    return f"{value:g}".replace("-", MINUS)
