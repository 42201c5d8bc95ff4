"""docs/results/study.md: every figure of its tables is computed from study_cpu.json beside it."""

import json
import re
from pathlib import Path

import pytest
from scipy import stats

from qurl_megatron.evaluation.study_results import spread

RESULTS = Path(__file__).parents[2] / "docs/results"
PAGE = (RESULTS / "study.md").read_text(encoding="utf-8")
RECORD = json.loads((RESULTS / "study_cpu.json").read_text(encoding="utf-8"))
GROUPS, RUNS = RECORD["groups"], RECORD["runs"]

METHODS = {
    "unquantized rollouts": "bf16",
    "naive (Eq. 3)": "naive",
    "uncorrected (Eq. 1)": "proximal",
    "decoupled (Eq. 4)": "decoupled",
    "TIS (Eq. 5)": "tis",
    "ACR (Eq. 9)": "acr",
    "ACR, UAQ s = 1.5": "acr_uaq",
}
SCALES = {
    "s = 1": "acr",
    "s = 1.5": "acr_uaq",
    "s = 2": "acr_s2",
    "1.5 x learning rate": "acr_lr15",
    "2 x learning rate": "acr_lr20",
}
SCHEMES = {"Four bits": "int4", "Eight bits": "int8"}


def cells_below(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, row by row."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = section.split("\n\n|")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (.*) \|$", f"|{table}", re.MULTILINE)[1:]
    return [row.split(" | ") for row in rows]


def group_of(method: str, scheme: str) -> str:
    return f"{method},{'none' if method == 'bf16' else scheme}"


def trained_percent(group: str) -> list[float]:
    method, scheme = group.split(",")
    names = (f"{method}-{scheme}-seed-{seed}" for seed in (0, 1, 2))
    return [100 * RUNS[name]["accuracy_trained"] for name in names]


def mean_and_spread(percents: list[float]) -> str:
    values = spread(percents)
    return f"{values['mean']:.1f} ± {values['std']:.1f}"


def rolled_out(group: str) -> str:
    return mean_and_spread([100 * value for value in GROUPS[group]["accuracy"]["values"]])


def small(value: float) -> str:
    if value >= 1e-3:
        return f"{value:.2g}"
    return f"{value:.0e}".replace("e-0", "e-") if value > 1e-9 else "0"


@pytest.mark.parametrize("heading", SCHEMES)
def test_the_tables_of_methods_are_the_records(heading):
    expected = []
    for label, method in METHODS.items():
        group = group_of(method, SCHEMES[heading])
        measured, trained = GROUPS[group], trained_percent(group)
        expected.append(
            [
                label,
                mean_and_spread(trained),
                ", ".join(f"{value:.1f}" for value in trained),
                rolled_out(group),
                small(measured["kl"]["mean"]),
                f"{measured['rho_max']['high']:.3g}",
                f"{100 * measured['clip_fraction']['mean']:.1f} %",
                f"{100 * measured['acr_active']['mean']:.2f} %" if "acr" in method else "–",
            ]
        )
    assert cells_below(heading) == expected


def test_the_table_of_differences_is_the_records():
    unquantized = trained_percent("bf16,none")

    def difference(method: str, scheme: str) -> str:
        trained = trained_percent(f"{method},{scheme}")
        gap = (sum(trained) - sum(unquantized)) / 3
        p = stats.ttest_ind(trained, unquantized, equal_var=False).pvalue
        return f"{gap:+.1f} (p = {p:.2f})".replace("-", "−").replace("= 0.", "= .")

    assert cells_below("How far three seeds carry") == [
        [label, difference(method, "int4"), difference(method, "int8")]
        for label, method in METHODS.items()
        if method != "bf16"
    ]


def test_the_table_of_scales_is_the_records():
    expected = []
    for rollouts, scheme in (("INT8", "int8"), ("INT4, simulated", "int4")):
        for label, method in SCALES.items():
            group = f"{method},{scheme}"
            flips, update, error = (
                GROUPS[group][name]["mean"]
                for name in ("code_flip_rate", "weight_update", "weight_error")
            )
            expected.append(
                [
                    label,
                    rollouts,
                    mean_and_spread(trained_percent(group)),
                    rolled_out(group),
                    f"{100 * flips:.3g} %" if flips > 0.01 else f"{100 * flips:.2f} %",
                    f"{update:.1e}".replace("e-0", "e-"),
                    f"{error:.1e}".replace("e-0", "e-"),
                    f"{update / error:.2g}" if update > 0.01 * error else f"{update / error:.4f}",
                ]
            )
    assert cells_below("A larger s, or a larger learning rate") == expected


def test_the_page_says_how_many_runs_it_holds_and_all_of_them_are_there():
    assert len(RUNS) == 57 and {run["state"] for run in RUNS.values()} == {"done"}
    assert f"All {len(RUNS)} runs" in PAGE
    assert all(run["curves"]["reward/mean"]["steps"][-1] == 80 for run in RUNS.values())
    collapsed = [name for name, run in RUNS.items() if run["collapse_step"] is not None]
    assert f"{len(collapsed) or 'No'} run" in PAGE
