"""The pictures of docs/results/README.md, drawn from the records of studies.

``python -m benchmarks.study_page`` writes them with its tables. Each file has the SHA-256 of its
records within it, by which a test finds one that is out of date: the bytes of a drawing differ
between versions of matplotlib.
"""

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.paired import (
    MARGIN,
    NOTHING_ADDED,
    UNQUANTIZED,
    WORTH_A_STUDY,
    by_warm_start,
    differences,
    gaps,
    mean_interval,
    uncorrected,
    upper_bound,
)
from qurl_megatron.evaluation.study_results import NOTHING
from qurl_megatron.kit.disk import read_json
from qurl_megatron.observe.drawing import COLORS, STYLE

RESULTS = Path(__file__).parents[1] / "docs/results"
IMAGES = RESULTS / "study"
MADE_OF = "Source"
"""Key of a PNG's text under which the digest of its records stands."""

LEAST = 3e-5
"""Where a logarithmic axis of shares begins; a share of 0 stands there."""

Record = Mapping[str, Any]  # what a study.json holds


@dataclass(frozen=True)
class Picture:
    title: str
    records: tuple[str, ...]  # their names in docs/results
    draw: Callable[[Axes, Sequence[Record]], None]
    height: float  # inches


def doses(axes: Axes, records: Sequence[Record]) -> None:
    """Draw each cell's mean share of the gradient, and its one-sided upper 95 % bound."""
    labels: list[str] = []
    for task, record in zip(("sorting", "spiral"), records, strict=True):
        for name, group in record["groups"].items():
            method, scheme = name.split(",")
            share = group["acr_gradient_share"]
            bound = upper_bound(np.array(share["values"]))
            color = COLORS["orange" if scheme == "int4" else "blue"]
            place = len(labels)
            axes.plot([max(share["mean"], LEAST), max(bound, LEAST)], [place] * 2, color=color)
            axes.plot(max(share["mean"], LEAST), place, "o", ms=6, color=color)
            labels.append(f"{scheme.upper()}, {task}, {record['methods'][method]['label']}")
    axes.set_xscale("log")
    axes.set_xlim(LEAST / 1.3, 0.03)
    axes.axvline(NOTHING_ADDED, color=COLORS["muted"], ls="--", lw=1)
    axes.axvline(WORTH_A_STUDY, color=COLORS["muted"], lw=1)
    axes.set_xlabel("share of the gradient (0 at the left edge); line: upper 95 % bound")
    _rows(axes, labels)


def to_unquantized(axes: Axes, records: Sequence[Record]) -> None:
    """Draw each arm's difference to the unquantized one: 95 % interval, and each model's mean."""
    (record,) = records
    labels = []
    for place, (label, scheme, pairs) in enumerate(gaps(record)):
        mean, half = mean_interval(np.array(list(pairs.values())))
        models = by_warm_start(pairs)
        color = COLORS["orange" if scheme == "INT4" else "blue"]
        axes.plot([mean - half, mean + half], [place] * 2, color=color, lw=2)
        axes.plot(mean, place, "o", ms=7, color=color)
        axes.plot(models, [place] * len(models), "|", ms=9, color=COLORS["muted"], zorder=1)
        labels.append(label if scheme == NOTHING else f"{label}, {scheme}")
    axes.axvline(0, color=COLORS["ink"], lw=1)
    axes.axvspan(-MARGIN, MARGIN, color=COLORS["rule"], zorder=0)
    axes.set_xlabel("points to unquantized; line: 95 % interval of the pairs; bars: models")
    _rows(axes, labels)


def against_kl(axes: Axes, records: Sequence[Record]) -> None:
    """Draw the difference of each uncorrected arm to the unquantized one, over its KL."""
    (record,) = records
    for arm, kl in uncorrected(record).items():
        pairs = differences(record, (arm, UNQUANTIZED))
        mean, half = mean_interval(np.array(list(pairs.values())))
        axes.errorbar(kl, mean, half, fmt="o", ms=7, capsize=4, color=COLORS["blue"])
        scheme = arm.split(",")[1].upper()
        axes.annotate(scheme, (kl, mean), xytext=(9, 5), textcoords="offset points")
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.set_xlabel("mean KL of rollouts and trainer (rollout/kl_k3), uncorrected")
    axes.set_ylabel("points to unquantized", color=COLORS["muted"])
    axes.axhline(0, color=COLORS["ink"], lw=1)
    axes.axhspan(-MARGIN, MARGIN, color=COLORS["rule"], zorder=0)
    axes.spines[["top", "right"]].set_visible(False)


def weights(axes: Axes, records: Sequence[Record]) -> None:
    """Draw updates over many steps at two learning rates, and the quantization error."""
    for rate, record, color in zip(("1e-4", "1e-6"), records, ("blue", "green"), strict=True):
        steps = [change["last"] for change in record["changes"]]
        updates = [change["update"] for change in record["changes"]]
        axes.plot(steps, updates, "o-", color=COLORS[color], label=f"update, learning rate {rate}")
    errors = [change["error"] for change in records[0]["changes"]]
    axes.plot(steps, errors, "o-", color=COLORS["orange"], label="INT8's error")
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.grid(color=COLORS["rule"], lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


PICTURES = {
    "weights.png": Picture(
        "Relative squared change of weights over 16 steps (the paper's Figure 9)",
        ("weights_lr1e-4", "weights_lr1e-6"),
        weights,
        3.6,
    ),
    "doses.png": Picture(
        "ACR adds less than a hundredth (line) of the gradient in all 16 cells",
        ("dose_sort", "dose_spiral"),
        doses,
        5.2,
    ),
    "one_block.png": Picture(
        "Trained policies on sorting: points to unquantized rollouts",
        ("one_block",),
        to_unquantized,
        5.0,
    ),
    "one_block_kl.png": Picture(
        "What is lost without a correction, by the KL of rollouts and trainer",
        ("one_block",),
        against_kl,
        3.6,
    ),
    "hard.png": Picture(
        "Trained policies where four bits are hard: points to unquantized rollouts",
        ("hard",),
        to_unquantized,
        3.6,
    ),
}


def digest(records: Sequence[str]) -> str:
    """Return the SHA-256 of records, by their names in docs/results."""
    contents = b"".join((RESULTS / f"{name}.json").read_bytes() for name in records)
    return hashlib.sha256(contents).hexdigest()


def png(picture: Picture) -> bytes:
    records = [read_json(RESULTS / f"{name}.json") for name in picture.records]
    with matplotlib.rc_context(STYLE):
        figure = Figure((9.6, picture.height), facecolor=COLORS["paper"], layout="constrained")
        axes = figure.add_subplot()
        axes.set_facecolor("none")
        picture.draw(axes, records)
        figure.suptitle(picture.title, x=0.02, ha="left", fontsize=12.5, fontweight="bold")
        file = io.BytesIO()
        metadata = {MADE_OF: digest(picture.records), "Software": None}
        figure.savefig(file, format="png", dpi=110, metadata=metadata)
    return file.getvalue()


def _rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(axis="x", color=COLORS["rule"], lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
