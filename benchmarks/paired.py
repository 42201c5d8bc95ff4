"""Tests between the arms of a study, run by run: pairs share their warm start and their seed.

A study whose record was joined of parts has its own models in each: another machine may round
differently, and make another model of the same seed.

    python -m benchmarks.paired OUT/study.json [--alone OUT_ALONE/study.json]

prints what docs/results/preregistered.md plans for the study: of S0 the doses, of S1 and S2 the
primary tests, corrected by Holm's procedure over all of them, and what stands beside them.
Shapes: N = pairs.
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
    arms: tuple[str, ...]  # METHOD,SCHEME: first minus second (minus third plus fourth)
    test: Literal["equivalent", "not inferior", "different"]


SIGNS = (1, -1, -1, 1)

Place = tuple[int, Any, int]
"""A pair's part of the study (0 where it has none), warm start and seed."""

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

UNPLANNED = (
    Contrast("TIS - Eq. 1, INT4", ("tis,int4", "proximal,int4"), "different"),
    Contrast("TIS - Eq. 1, INT5", ("tis,int5", "proximal,int5"), "different"),
    Contrast("ACR - Eq. 1, INT4", ("acr,int4", "proximal,int4"), "different"),
    Contrast("UAQ - TIS, INT4", ("tis_uaq,int4", "tis,int4"), "different"),
)
"""Differences of S1 that were asked for once its results were known."""

UNQUANTIZED, EQ1 = "unquantized,none", "proximal,int4"
STEPS = 40
"""Steps of a run of S2."""

ANSWERS = {
    "TIS": "tis,int4",
    "IcePop": "icepop,int4",
    "align=full": "align_full,int4",
    "align=weights, TIS": "align_weights_tis,int4",
    "dithered, TIS": "tis_dithered,int4",
}
"""The arms of S2 that answer to rounding which Eq. 1 does not correct."""

PRIMARY_HARD = (
    *(Contrast(f"{name} - Eq. 1", (arm, EQ1), "different") for name, arm in ANSWERS.items()),
    Contrast("align=full - TIS", ("align_full,int4", "tis,int4"), "different"),
    Contrast("dithered, TIS - TIS", ("tis_dithered,int4", "tis,int4"), "different"),
)


def differences(record: Mapping[str, Any], arms: Sequence[str]) -> dict[Place, float]:
    """Return the difference in points of each pair, where all arms have a run."""
    values = []
    for arm in arms:
        values.append(
            {
                _place(run): 100 * run[TRAINED]
                for run in record["runs"].values()
                if _arm(run) == arm and run.get(TRAINED) is not None
            }
        )
    return {
        place: sum(sign * of_arm[place] for sign, of_arm in zip(SIGNS, values, strict=False))
        for place in sorted(set.intersection(*map(set, values)))
    }


def by_warm_start(of_pairs: Mapping[Place, float]) -> np.ndarray:
    """Return the mean difference of each warm start."""
    pairs = groupby(of_pairs.items(), lambda pair: pair[0][:2])
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


def p_value(values_N: np.ndarray, test: str) -> float:
    """Return the p of a paired t-test.

    Args:
        test: "equivalent": the mean is within ``MARGIN``, the larger p of two one-sided tests;
            "not inferior": it is above minus ``MARGIN``; "different": it is not 0.
    """

    def p(center: float, alternative: str) -> float:
        return float(stats.ttest_1samp(values_N, center, alternative=alternative).pvalue)

    if test == "different":
        return p(0.0, "two-sided")
    above = p(-MARGIN, "greater")
    return above if test == "not inferior" else max(above, p(MARGIN, "less"))


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


def comparisons(record: Mapping[str, Any], contrasts: Sequence[Contrast] = PRIMARY) -> list[str]:
    """Return the table of the contrasts whose arms have two pairs or more, with Holm's correction
    over all contrasts.

    An arm of which a run failed is not called equivalent, nor not inferior. Such runs are listed.
    """
    failed = {name: _arm(run) for name, run in record["runs"].items() if run["state"] == "failed"}
    measured = []
    for contrast in contrasts:
        pairs = differences(record, contrast.arms)
        if len(pairs) > 1:
            p = p_value(np.array(list(pairs.values())), contrast.test)
            if contrast.test != "different" and set(failed.values()) & set(contrast.arms):
                p = 1.0
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
    if failed:
        lines += ["", f"Failed: {', '.join(failed)}."]
    return lines


def gaps(record: Mapping[str, Any]) -> list[tuple[str, str, dict[Place, float]]]:
    """Return each arm's label, its quantized rollouts, and its differences to unquantized."""
    arms = []
    for arm in record["groups"]:
        pairs = differences(record, (arm, UNQUANTIZED))
        if arm != UNQUANTIZED and len(pairs) > 1:
            method, scheme = arm.split(",")
            rollouts = NOTHING if scheme == "none" else scheme.upper()
            arms.append((record["methods"][method]["label"], rollouts, pairs))
    return arms


def to_unquantized(record: Mapping[str, Any]) -> list[str]:
    """Return the table of ``gaps``."""
    lines = [
        "| arm | rollouts | pairs | to unquantized, 95 % interval | by warm start |",
        "|---|---|---:|---:|---:|",
    ]
    for label, scheme, pairs in gaps(record):
        lines.append(
            f"| {label} | {scheme} | {len(pairs)} "
            f"| {_interval(np.array(list(pairs.values())))} | {_interval(by_warm_start(pairs))} |"
        )
    return lines


def gate(record: Mapping[str, Any]) -> list[str]:
    """Return the sentence of S2's gate: the gains of the unquantized runs of seed 0, as rolled
    out."""
    gains = []
    for run in record["runs"].values():
        if _arm(run) == UNQUANTIZED and run["seed"] == 0:
            gains.append(f"{100 * (run['accuracy'] - run['accuracy_before']):.0f}")
    return [f"The gate asks for 15 points. The unquantized runs gained {', '.join(gains)}."]


def uncorrected(record: Mapping[str, Any]) -> dict[str, float]:
    """Return each quantized arm of Eq. 1 with its mean ``rollout/kl_k3``, the lowest first."""
    kl = {
        arm: group["kl_mean"]["mean"]
        for arm, group in record["groups"].items()
        if arm.startswith("proximal,")
    }
    return dict(sorted(kl.items(), key=lambda arm: arm[1]))


def against_kl(record: Mapping[str, Any]) -> list[str]:
    """Return the table of the uncorrected arms by their KL, and the sentence of their slope."""
    lines = ["| rollouts | KL | pairs | to unquantized, 95 % interval |", "|---|---:|---:|---:|"]
    for arm, kl in uncorrected(record).items():
        pairs = differences(record, (arm, UNQUANTIZED))
        values = np.array(list(pairs.values()))
        scheme = arm.split(",")[1].upper()
        lines.append(f"| {scheme} | {kl:.2g} | {len(pairs)} | {_interval(values)} |")
    slope = _interval(slope_on_kl(record))
    return [*lines, "", f"Slope: {slope} points for each factor of ten in KL."]


def slope_on_kl(record: Mapping[str, Any]) -> np.ndarray:
    """Return each pair's slope of the uncorrected arms, in points per factor of ten in KL; [N].

    The difference to unquantized over log10 of the arm's mean ``rollout/kl_k3``, by least squares
    over those arms; a pair counts where all have a run.
    """
    arms = uncorrected(record)
    of_arms = [differences(record, (arm, UNQUANTIZED)) for arm in arms]
    log_kl = np.log10(list(arms.values()))
    places = sorted(set.intersection(*map(set, of_arms)))
    values = np.array([[of_arm[place] for place in places] for of_arm in of_arms])
    return np.polyfit(log_kl, values, 1)[0]


def collapses(record: Mapping[str, Any]) -> list[str]:
    """Return the table of S2's collapses: the log-rank test of each answer against Eq. 1."""
    arms = {**ANSWERS, "Eq. 1": EQ1}
    steps: dict[str, list[int | None]] = {arm: [] for arm in arms.values()}
    for run in record["runs"].values():
        if _arm(run) in steps and run["state"] == "done":
            steps[_arm(run)].append(run["collapse_step"])
    adjusted = holm([log_rank(steps[arm], steps[EQ1], STEPS) for arm in ANSWERS.values()])
    p_texts = [*(f"{p:.3f}" for p in adjusted), NOTHING]
    lines = ["| arm | collapsed | runs | p, Holm |", "|---|---:|---:|---:|"]
    for (name, arm), p_text in zip(arms.items(), p_texts, strict=True):
        collapsed = sum(step is not None for step in steps[arm])
        lines.append(f"| {name} | {collapsed} | {len(steps[arm])} | {p_text} |")
    return lines


def at_equal_seconds(record: Mapping[str, Any], alone: Mapping[str, Any]) -> list[str]:
    """Return the table of accuracies, as rolled out, when the fastest arm has done its steps.

    Args:
        alone: study.json of one run of each arm, made one after another.
    """
    step_seconds = {
        arm: group["step_seconds"]["mean"]
        for arm, group in alone["groups"].items()
        if group["step_seconds"]
    }
    time = STEPS * min(step_seconds.values())
    lines = [
        f"| arm | seconds of a step | steps in {time:.0f} s | accuracy, % | to Eq. 1, points |",
        "|---|---:|---:|---:|---:|",
    ]
    reached: dict[str, dict[Place, float]] = {}
    for arm, seconds in step_seconds.items():
        reached[arm] = {}
        for run in record["runs"].values():
            if _arm(run) == arm and "curves" in run:
                curve = run["curves"]["eval/accuracy"]
                value = 100 * np.interp(time / seconds, curve["steps"], curve["values"])
                reached[arm][_place(run)] = float(value)
    for arm, values in reached.items():
        common = sorted(values.keys() & reached[EQ1].keys())
        more = np.array([values[place] - reached[EQ1][place] for place in common])
        lines.append(
            f"| {record['methods'][arm.split(',')[0]]['label']} | {step_seconds[arm]:.2f} "
            f"| {time / step_seconds[arm]:.1f} | {fmean(values.values()):.1f} "
            f"| {NOTHING if arm == EQ1 else _interval(more)} |"
        )
    return lines


def _place(run: Mapping[str, Any]) -> Place:
    return run.get("part", 0), run["warmstart_seed"], run["seed"]


def _arm(run: Mapping[str, Any]) -> str:
    return f"{run['method']},{run['scheme']}"


def _interval(values: np.ndarray) -> str:
    if len(values) < 2:
        return NOTHING
    mean, half = mean_interval(values)
    return f"{mean:+.1f} ± {half:.1f}"


def doses(record: Mapping[str, Any]) -> list[str]:
    """Return the table of S0: the share of the gradient that ACR adds, and what follows."""
    lines = [
        "| setting | rollouts | runs | gradient share | upper 95 % bound | so |",
        "|---|---|---:|---:|---:|---|",
    ]
    for name, group in record["groups"].items():
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
            f"| {record['methods'][method]['label']} | {scheme.upper()} | {len(share['values'])} "
            f"| {share['mean']:.3g} | {bound:.3g} | {verdict} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path, help="study.json of a qurl study")
    parser.add_argument("--alone", type=Path, help="of S2: that of runs made one after another")
    args = parser.parse_args()
    record = json.loads(args.record.read_text(encoding="utf-8"))
    if record["name"] == "one_block":
        lines = [
            *comparisons(record),
            "",
            *comparisons(record, UNPLANNED),
            "",
            *to_unquantized(record),
            "",
            *against_kl(record),
        ]
    elif record["name"] == "hard":
        lines = [
            *gate(record),
            "",
            *comparisons(record, PRIMARY_HARD),
            "",
            *to_unquantized(record),
            "",
            *collapses(record),
        ]
        if args.alone:
            alone = json.loads(args.alone.read_text(encoding="utf-8"))
            lines += ["", *at_equal_seconds(record, alone)]
    else:
        lines = doses(record)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
