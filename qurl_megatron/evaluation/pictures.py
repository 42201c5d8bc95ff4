"""The paper's Figures 2, 3, 4 and 9 for a study: one line per method, a band over its seeds.

Two images per scheme: training, and what an update changes of the codes. Frames look as in the
report of a run (observe.drawing); the legend stands in a frame of its own, since all share it.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qurl_megatron.evaluation.study_results import Group
from qurl_megatron.observe.catalogue import known
from qurl_megatron.observe.drawing import COLORS, STYLE, frame, smooth
from qurl_megatron.observe.metrics import Series
from qurl_megatron.observe.text import how_many

SKY = "#56b4e9"  # of the palette of COLORS; beside its blue it marks a variant of that method
LINES = ("ink", "orange", "yellow", "purple", "green", SKY, "blue", "muted")
"""Colours by place in the study file: unquantized first, then the paper's baselines, then ours."""

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

    def curves(self, group: Group, metric: str) -> list[Series]:
        """Return the values of each seed that the scale can show."""
        curves = group.curves(metric)
        if self.log:
            curves = [(steps[values > 0], values[values > 0]) for steps, values in curves]
        return [curve for curve in curves if len(curve[0])]


ACCURACY = Panel("Held-out accuracy", ("eval/accuracy",))
CLIPPED = Panel("Clipped tokens (Fig. 2 b)", ("policy/clip_fraction",))
KL = Panel(
    "KL of behaviour from proximal policy, k3 (Fig. 3 a)",
    ("rollout/kl_k3",),
    log=True,
    decades=3,
)
PICTURES = {
    "training": (
        Panel("Reward (Fig. 2 a)", ("reward/mean",)),
        ACCURACY,
        CLIPPED,
        KL,
        Panel("Largest probability ratio (Fig. 3 b)", ("rollout/rho_max",), log=True),
    ),
    "updates": (
        ACCURACY,
        CLIPPED,
        Panel("Codes changed per step (Fig. 4 a)", ("quant/code_flip_rate",)),
        Panel("Difference of a token's two probabilities (Fig. 4 b)", ("rollout/prob_diff_mean",)),
        Panel(
            "Weight update per step; dashed: error (Fig. 9)",
            ("quant/weight_update", "quant/weight_error"),
            log=True,
        ),
    ),
}


def band(curves: Sequence[Series]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return steps, and mean, lowest and highest value over the curves at each; [N] each."""
    steps, values = (np.concatenate(part) for part in zip(*curves, strict=True))
    steps_N, place = np.unique(steps, return_inverse=True)
    at_step = [values[place == index] for index in range(len(steps_N))]
    mean, low, high = (np.array(list(map(f, at_step))) for f in (np.mean, np.min, np.max))
    return steps_N, mean, low, high


def pictures(groups: Sequence[Group]) -> dict[str, bytes]:
    """Return PNG images by name, of all groups that have finished runs."""
    drawn = {}
    for scheme in dict.fromkeys(group.scheme for group in groups if group.scheme != "none"):
        if any(group.done for group in groups if group.scheme == scheme):
            # Unquantized training is the line to reach in each of them.
            chosen = [group for group in groups if group.scheme in ("none", scheme)]
            for name, panels in PICTURES.items():
                drawn[f"{name}_{scheme}.png"] = _png(panels, chosen)
    return drawn


def _png(panels: Sequence[Panel], groups: Sequence[Group]) -> bytes:
    # By place, so that a method keeps its colour while those before it are not finished.
    colors = {}
    for place, group in enumerate(groups):
        color = LINES[place % len(LINES)]
        colors[group.name] = COLORS.get(color, color)
    groups = [group for group in groups if group.done]
    drawable = []
    for panel in panels:
        if any(panel.curves(group, metric) for group in groups for metric in panel.metrics):
            drawable.append(panel)
    rows = math.ceil((len(drawable) + 1) / COLUMNS)
    width, height = 6.2 * COLUMNS, 3.4 * rows
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), facecolor=COLORS["paper"])
        # Margins in inches; a layout that is computed takes as long again as the drawing.
        figure.subplots_adjust(
            left=0.75 / width,
            right=1 - 0.2 / width,
            bottom=0.45 / height,
            top=1 - 0.45 / height,
            wspace=0.17,
            hspace=0.34,
        )
        for place, panel in enumerate(drawable, 1):
            _draw(figure.add_subplot(rows, COLUMNS, place), panel, groups, colors)
        legend = figure.add_subplot(rows, COLUMNS, len(drawable) + 1)
        legend.axis("off")
        handles = []
        for group in groups:
            label = f"{group.method.label}, {how_many(len(group.done), 'run')}"
            handles.append(Line2D([], [], color=colors[group.name], lw=2.4, label=label))
        legend.legend(handles=handles, loc="center left", frameon=False, fontsize=12)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()


def _draw(axes: Axes, panel: Panel, groups: Sequence[Group], colors: dict[str, str]) -> None:
    """Draw each method's mean over seeds, smoothed, on the band from lowest to highest."""
    axes.set_facecolor("none")
    if panel.log:
        axes.set_yscale("log")
    last = 0
    for group in groups:
        for metric, dashes in zip(panel.metrics, ("-", (0, (4, 2))), strict=False):
            if not (curves := panel.curves(group, metric)):
                continue
            steps, mean, low, high = band(curves)
            mean, low, high = (smooth(values, log=panel.log) for values in (mean, low, high))
            color = colors[group.name]
            style: dict[str, Any] = dict(marker="o", ms=4.5) if metric == "eval/accuracy" else {}
            axes.plot(steps, mean, color=color, lw=1.9, ls=dashes, zorder=3, **style)
            if len(curves) > 1:
                axes.fill_between(steps, low, high, color=color, alpha=0.13, lw=0, zorder=2)
            last = max(last, int(steps[-1]))
    bottom, top = axes.get_ylim()
    if panel.log:
        axes.set_ylim(bottom=max(bottom, top / 10**panel.decades))
    elif axes.dataLim.y0 >= 0:
        axes.set_ylim(bottom=0.0)
    frame(axes, 0, last, shares=known(panel.metrics[0]).unit == "share")
    axes.set_title(panel.title, loc="left", y=1.0, pad=10, fontsize=12, fontweight="bold")
