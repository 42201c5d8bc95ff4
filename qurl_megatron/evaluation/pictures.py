"""The paper's Figures 2, 3 and 9 for a study: one line per method, a band over its seeds.

One image per scheme for the methods, and one for the UAQ scales. Frames look as in the report of a
run (observe.drawing); the legend stands in a frame of its own, since all of them share it.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qurl_megatron.evaluation.plan import METHODS, SCALE
from qurl_megatron.evaluation.study_results import Group, Series
from qurl_megatron.observe.catalogue import unit
from qurl_megatron.observe.drawing import COLORS, STYLE, frame, smooth

SKY = "#56b4e9"  # of the palette of COLORS; beside its blue it marks a variant of that method
LINES = {
    # Unquantized first, then the paper's baselines, then ours in two blues.
    METHODS: ("ink", "orange", "yellow", "purple", "green", SKY, "blue", "muted"),
    # s = 1 and 1.5 as there, then the other settings.
    SCALE: (SKY, "blue", "ink", "orange", "yellow", "purple", "green", "muted"),
}
"""Colours by place in the study file."""

COLUMNS = 2


@dataclass(frozen=True)
class Panel:
    """One frame; its second metric, if any, is drawn dashed."""

    title: str
    metrics: tuple[str, ...]
    log: bool = False
    decades: float = math.inf
    """How far below the largest value a log scale goes: unquantized rollouts on the same machine
    have next to no gap, and would flatten all others."""

    points: bool = False
    """Each seed's values instead of the band; the mean of a maximum hides the outliers."""


KL = ("rollout/kl_k3",)
TRAINING = (
    Panel("Reward (Fig. 2 a)", ("reward/mean",)),
    Panel("Held-out accuracy", ("eval/accuracy",)),
    Panel("Clipped tokens (Fig. 2 b)", ("policy/clip_fraction",)),
    Panel("KL of behaviour from proximal policy, k3 (Fig. 3 a)", KL, log=True, decades=3),
    Panel("Largest probability ratio (Fig. 3 b)", ("rollout/rho_max",), log=True, points=True),
)
UPDATES = (
    Panel("Held-out accuracy", ("eval/accuracy",)),
    Panel("Clipped tokens", ("policy/clip_fraction",)),
    Panel("Codes changed per step (Fig. 4 a)", ("quant/code_flip_rate",)),
    Panel("KL of behaviour from proximal policy, k3 (Fig. 4 b)", KL, log=True, decades=3),
    Panel(
        "Weight update per step; dashed: error (Fig. 9)",
        ("quant/weight_update", "quant/weight_error"),
        log=True,
    ),
)


def band(curves: Sequence[Series]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, and mean, lowest and highest value over the curves that have the step; [N] each."""
    by_step: dict[int, list[float]] = {}
    for steps_N, values_N in curves:
        for step, value in zip(steps_N.tolist(), values_N.tolist(), strict=True):
            by_step.setdefault(step, []).append(value)
    mean, low, high = [], [], []
    for _, values in sorted(by_step.items()):
        mean.append(np.mean(values))
        low.append(min(values))
        high.append(max(values))
    return np.array(sorted(by_step)), np.array(mean), np.array(low), np.array(high)


def pictures(groups: Sequence[Group]) -> dict[str, bytes]:
    """PNG images by name, of all groups that have finished runs."""
    drawn = {}
    for scheme in dict.fromkeys(group.scheme for group in groups):
        if scheme == "none":
            continue
        # Unquantized training is the line to reach in each of them.
        groups_of_scheme = [group for group in groups if group.scheme in ("none", scheme)]
        for name, panels, table in (("training", TRAINING, METHODS), ("scale", UPDATES, SCALE)):
            chosen = [group for group in groups_of_scheme if table in group.method.tables]
            if any(group.histories for group in chosen if group.scheme == scheme):
                drawn[f"{name}_{scheme}.png"] = _png(panels, chosen, LINES[table])
    return drawn


def _png(panels: Sequence[Panel], groups: Sequence[Group], lines: Sequence[str]) -> bytes:
    # By place, so that a method keeps its colour while those before it are not finished.
    colors = {}
    for place, group in enumerate(groups):
        color = lines[place % len(lines)]
        colors[group.name] = COLORS.get(color, color)
    groups = [group for group in groups if group.histories]
    panels = [panel for panel in panels if _drawable(panel, groups)]
    rows = math.ceil((len(panels) + 1) / COLUMNS)
    width, height = 6.2 * COLUMNS, 3.4 * rows
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), facecolor=COLORS["paper"])
        FigureCanvasAgg(figure)
        # Margins in inches; a layout that is computed takes as long again as the drawing.
        figure.subplots_adjust(
            left=0.75 / width,
            right=1 - 0.2 / width,
            bottom=0.45 / height,
            top=1 - 0.45 / height,
            wspace=0.17,
            hspace=0.34,
        )
        for place, panel in enumerate(panels, 1):
            _draw(figure.add_subplot(rows, COLUMNS, place), panel, groups, colors)
        legend = figure.add_subplot(rows, COLUMNS, len(panels) + 1)
        legend.axis("off")
        handles = [
            Line2D([], [], color=colors[group.name], lw=2.4, label=_label(group))
            for group in groups
        ]
        legend.legend(handles=handles, loc="center left", frameon=False, fontsize=12)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()


def _draw(axes: Axes, panel: Panel, groups: Sequence[Group], colors: dict[str, str]) -> None:
    """Each method's mean over seeds, smoothed, on the band from lowest to highest."""
    axes.set_facecolor("none")
    if panel.log:
        axes.set_yscale("log")
    last = 0
    for group in groups:
        for metric, dashes in zip(panel.metrics, ("-", (0, (4, 2))), strict=False):
            curves = group.curves(metric)
            if panel.log:
                curves = [(steps[values > 0], values[values > 0]) for steps, values in curves]
            curves = [curve for curve in curves if len(curve[0])]
            if not curves:
                continue
            steps, mean, low, high = band(curves)
            mean, low, high = (smooth(values, log=panel.log) for values in (mean, low, high))
            color = colors[group.name]
            style: dict[str, Any] = dict(marker="o", ms=4.5) if metric == "eval/accuracy" else {}
            axes.plot(steps, mean, color=color, lw=1.9, ls=dashes, zorder=3, **style)
            if panel.points:
                for curve in curves:
                    axes.plot(*curve, "o", color=color, ms=3, mew=0, alpha=0.3, zorder=2)
            elif len(curves) > 1:
                axes.fill_between(steps, low, high, color=color, alpha=0.13, lw=0, zorder=2)
            last = max(last, int(steps[-1]))
    bottom, top = axes.get_ylim()
    if panel.log:
        axes.set_ylim(bottom=max(bottom, top / 10**panel.decades))
    elif axes.dataLim.y0 >= 0:
        axes.set_ylim(bottom=0.0)
    frame(axes, 0, last, shares=unit(panel.metrics[0]) == "share")
    axes.set_title(panel.title, loc="left", y=1.0, pad=10, fontsize=12, fontweight="bold")


def _drawable(panel: Panel, groups: Sequence[Group]) -> bool:
    for group in groups:
        for name in panel.metrics:
            for _, values in group.curves(name):
                if not panel.log or (values > 0).any():
                    return True
    return False


def _label(group: Group) -> str:
    seeds = len(group.histories)
    return f"{group.method.label}, {seeds} {'seed' if seeds == 1 else 'seeds'}"
