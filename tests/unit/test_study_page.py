"""docs/results/study.md: the figures of its tables are those of docs/results/study_cpu.json."""

import json
import re
from pathlib import Path

from qurl_megatron.study.numbers import spread

RESULTS = Path(__file__).parents[2] / "docs/results"
PAGE = (RESULTS / "study.md").read_text(encoding="utf-8")
RECORD = json.loads((RESULTS / "study_cpu.json").read_text(encoding="utf-8"))
GROUPS = RECORD["groups"]

FOUR_BITS = {
    "unquantized rollouts": "bf16,none",
    "naive (Eq. 3)": "naive,int4",
    "uncorrected (Eq. 1)": "proximal,int4",
    "decoupled (Eq. 4)": "decoupled,int4",
    "TIS (Eq. 5)": "tis,int4",
    "ACR (Eq. 9), s = 1": "acr,int4",
    "ACR, UAQ s = 1.5": "acr_uaq,int4",
}
EIGHT_BITS = {"naive (Eq. 3)": "naive,int8", "ACR (Eq. 9), s = 1": "acr,int8"}


def cells_below(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, row by row."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)[1:]
    return [row.split(" | ") for row in rows]


def trained_percent(group: str) -> list[float]:
    runs = RECORD["trained_policies_unquantized_greedy"].items()
    return [100 * run["accuracy"] for name, run in runs if name.startswith(f"{group},seed=")]


def mean_and_spread(percents: list[float]) -> str:
    values = spread(percents)
    return f"{values.mean:.1f} ± {values.std:.1f}" if len(percents) > 1 else f"{values.mean:.1f}"


def nats(kl: float) -> str:
    return f"{kl:.3f}" if kl > 1e-3 else f"{kl:.0e}".replace("e-0", "e-")


def ratio(rho: float) -> str:
    return f"{rho:.1f}" if rho < 1.1 else f"{rho:.2f}" if rho < 10 else f"{rho:.0f}"


def row_of(label: str, group: str, *, whole: bool) -> list[str]:
    """A row of the page's first two tables; without ``whole`` lacks seeds and clipped tokens."""
    measured, trained = GROUPS[group], trained_percent(group)
    seeds = [", ".join(f"{value:.1f}" for value in trained)]
    clipped = [f"{100 * measured['clip_fraction']['mean']:.1f} %"]
    return [
        label,
        mean_and_spread(trained),
        *(seeds if whole else []),
        mean_and_spread([100 * value for value in measured["accuracy"]["values"]]),
        nats(measured["kl"]["mean"]),
        ratio(measured["rho_max"]["high"]),
        *(clipped if whole else []),
    ]


def test_the_table_of_four_bits_is_the_records():
    expected = [row_of(label, group, whole=True) for label, group in FOUR_BITS.items()]
    assert cells_below("Four bits") == expected


def test_the_table_of_eight_bits_is_the_records():
    expected = [row_of(label, group, whole=False) for label, group in EIGHT_BITS.items()]
    assert cells_below("Eight bits") == expected


def test_the_table_of_codes_is_the_records():
    def row(scale: str, rollouts: str, group: str) -> list[str]:
        flips, update, error = (
            GROUPS[group][name]["mean"]
            for name in ("code_flip_rate", "weight_update", "weight_error")
        )
        share = update / error
        return [
            scale,
            rollouts,
            f"{100 * flips:.3g} %" if flips > 0.01 else f"{100 * flips:.2f} %",
            f"{update:.2e}".replace("e-0", "e-"),
            f"{error:.4f}" if error > 1e-3 else f"{error:.2e}".replace("e-0", "e-"),
            f"{share:.2f}" if share > 0.1 else f"{share:.4f}",
        ]

    assert cells_below("Codes, updates and errors") == [
        row("1", "INT8", "acr,int8"),
        row("1", "INT4, simulated", "acr,int4"),
        row("1.5", "INT4, simulated", "acr_uaq,int4"),
    ]


def test_the_page_says_how_many_runs_it_holds():
    done = sum(group["done"] for group in GROUPS.values())
    planned = sum(group["planned"] for group in GROUPS.values())
    assert f"{done} of the study's {planned} runs" in PAGE
    assert RECORD["runs_done"] == len(RECORD["trained_policies_unquantized_greedy"]) == done
    assert {group["done"] for group in GROUPS.values()} == {0, 1, 3}
    assert all(group.get("collapse_step") is None for group in GROUPS.values())
