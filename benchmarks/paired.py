"""Tests between the arms of a study, run by run: pairs share their warm start and their seed.

    python -m benchmarks.paired OUT/study.json

prints what docs/results/preregistered.md plans: S1's comparisons, corrected by Holm's procedure
over all of them; S0's doses of a study without their arms. Shapes: N = pairs.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
from scipy import stats

from qurl_megatron.evaluation.study_results import NOTHING, TRAINED

MARGIN = 3.0
"""Points within which two arms count as equivalent, or one as not inferior."""


NOTHING_ADDED, WORTH_A_STUDY = 1e-3, 1e-2
"""Shares of the gradient: ACR is TIS below the one, and its outcome is studied above the other."""


@dataclass(frozen=True)
class Contrast:
    """A planned comparison, in points of the trained policy's accuracy."""

    claim: str
    arms: tuple[
        str, ...
    ]  # METHOD,SCHEME: the first minus the second (minus the third plus the 4th)
    test: Literal["equivalent", "not inferior", "different"]


SIGNS = (1, -1, -1, 1)

PRIMARY = (
    Contrast("ACR - TIS", ("acr,int4", "tis,int4"), "equivalent"),
    Contrast("UAQ - 1.33 x lr", ("tis_uaq,int4", "tis_lr133,int4"), "equivalent"),
    Contrast(
        "UAQ at INT4 - UAQ unquantized",
        ("tis_uaq,int4", "tis,int4", "unquantized_uaq,none", "unquantized,none"),
        "different",
    ),
    Contrast("INT8 - unquantized", ("proximal,int8", "unquantized,none"), "not inferior"),
    Contrast("FP8 - unquantized", ("proximal,fp8", "unquantized,none"), "not inferior"),
    Contrast("align=full - TIS", ("align_full,int4", "tis,int4"), "different"),
)


def differences(told: Mapping[str, Any], arms: Sequence[str]) -> dict[tuple[Any, int], float]:
    """Return the difference in points by (warm start, seed), where all arms have a run."""
    values = []
    for arm in arms:
        method, scheme = arm.split(",")
        values.append(
            {
                (run["warmstart_seed"], run["seed"]): 100 * run[TRAINED]
                for run in told["runs"].values()
                if (run["method"], run["scheme"]) == (method, scheme)
                and run.get(TRAINED) is not None
            }
        )
    return {
        place: sum(sign * of_arm[place] for sign, of_arm in zip(SIGNS, values, strict=False))
        for place in sorted(set.intersection(*map(set, values)))
    }


def by_warm_start(of_pairs: Mapping[tuple[Any, int], float]) -> np.ndarray:
    """Return the mean difference of each warm start."""
    pairs = groupby(of_pairs.items(), lambda pair: pair[0][0])
    return np.array([fmean(value for _, value in members) for _, members in pairs])


def mean_interval(values_N: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Return the mean and half of its two-sided t-interval."""
    n = len(values_N)
    half = stats.t.ppf(0.5 + level / 2, n - 1) * values_N.std(ddof=1) / n**0.5
    return float(values_N.mean()), float(half)


def upper_bound(values_N: np.ndarray, level: float = 0.95) -> float:
    """Return the one-sided upper t-bound of the mean."""
    mean, half = mean_interval(values_N, 2 * level - 1)
    return mean + half


def p_value(values_N: np.ndarray, test: str, margin: float = MARGIN) -> float:
    """Return the p of a paired t-test.

    Args:
        test: "equivalent": the mean is within the margin, the larger p of two one-sided tests;
            "not inferior": it is above minus the margin; "different": it is not 0.
    """

    def p(center: float, alternative: str) -> float:
        return float(stats.ttest_1samp(values_N, center, alternative=alternative).pvalue)

    if test == "different":
        return p(0.0, "two-sided")
    above = p(-margin, "greater")
    return above if test == "not inferior" else max(above, p(margin, "less"))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p of each: reject where it is at or below the level of the family."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(np.argsort(p_values)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def log_rank(collapses: Sequence[int | None], others: Sequence[int | None], steps: int) -> float:
    """Return the p of the log-rank test of steps of collapse; None: none within the ``steps``."""
    if not any(step is not None for step in (*collapses, *others)):
        return 1.0
    groups = []
    for arm in (collapses, others):
        groups.append(
            stats.CensoredData(
                uncensored=[step for step in arm if step is not None],
                right=[steps for step in arm if step is None],
            )
        )
    return float(stats.logrank(*groups).pvalue)


def comparisons(told: Mapping[str, Any], contrasts: Sequence[Contrast] = PRIMARY) -> list[str]:
    """The table of those contrasts whose arms have two pairs or more; Holm's is over all given."""
    measured = []
    for contrast in contrasts:
        pairs = differences(told, contrast.arms)
        if len(pairs) > 1:
            p = p_value(np.array(list(pairs.values())), contrast.test)
            measured.append((contrast, pairs, p))
    # A comparison that is still to come counts with a p of 1.
    missing = [1.0] * (len(contrasts) - len(measured))
    adjusted = holm([*(p for _, _, p in measured), *missing])
    lines = [
        "| difference | pairs | points, 95 % interval | by warm start | claim | p | p, Holm |",
        "|---|---:|---:|---:|---|---:|---:|",
    ]
    for (contrast, pairs, p), p_holm in zip(measured, adjusted, strict=False):
        within = "" if contrast.test == "different" else f" by {MARGIN:g}"
        lines.append(
            f"| {contrast.claim} | {len(pairs)} | {_interval(np.array(list(pairs.values())))} "
            f"| {_interval(by_warm_start(pairs))} | {contrast.test}{within} | {p:.3f} "
            f"| {p_holm:.3f} |"
        )
    return lines


def _interval(values: np.ndarray) -> str:
    if len(values) < 2:
        return NOTHING
    mean, half = mean_interval(values)
    return f"{mean:+.1f} ± {half:.1f}"


def doses(told: Mapping[str, Any]) -> list[str]:
    """The table of S0: what share of the gradient ACR adds, and what follows."""
    lines = [
        "| setting | rollouts | runs | gradient share | upper 95 % bound | so |",
        "|---|---|---:|---:|---:|---|",
    ]
    for name, group in told["groups"].items():
        method, scheme = name.split(",")
        if (share := group["acr_gradient_share"]) is None or len(share["values"]) < 2:
            continue
        bound = upper_bound(np.array(share["values"]))
        verdict = "no outcome is run"
        if bound < NOTHING_ADDED:
            verdict = "ACR is TIS here"
        elif share["mean"] > WORTH_A_STUDY:
            verdict = "TIS, ACR and placebo"
        lines.append(
            f"| {told['methods'][method]['label']} | {scheme.upper()} | {len(share['values'])} "
            f"| {share['mean']:.2g} | {bound:.2g} | {verdict} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path, help="study.json of a qurl study")
    told = json.loads(parser.parse_args().record.read_text(encoding="utf-8"))
    lines = comparisons(told)
    has_contrasts = len(lines) > 2
    print("\n".join(lines if has_contrasts else doses(told)))


if __name__ == "__main__":
    main()
