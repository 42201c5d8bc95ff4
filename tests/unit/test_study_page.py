"""Pages made from a study: their tables are those of its record. And the tests that are planned."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.mismatch_page import kept
from benchmarks.paired import (
    PRIMARY,
    Contrast,
    by_warm_start,
    comparisons,
    differences,
    doses,
    holm,
    log_rank,
    mean_interval,
    p_value,
    upper_bound,
)
from benchmarks.study_page import DOCS, TABLES, pages
from qurl_megatron.evaluation.plan import read_study

STUDIES = DOCS.parent / "launch/studies"


def test_the_tables_of_the_pages_are_made_of_the_records():
    """``python -m benchmarks.study_page`` writes them again."""
    for path, text in pages().items():
        assert path.read_text(encoding="utf-8") == text


def test_every_record_of_a_study_is_on_a_page():
    records = {path.name for path in DOCS.glob("results/*.json") if "groups" in json_of(path)}
    assert records == {f"{record}.json" for _, record, _ in TABLES.values()}
    assert kept()  # those of docs/mismatch.md have rows instead, and a test of their own


def json_of(path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def told(**arms: dict[tuple[int, int], float | None]) -> dict:
    """A study.json; by method the accuracy of each (warm start, seed), in percent."""
    runs = {}
    for method, values in arms.items():
        for (warm, seed), value in values.items():
            run = {"method": method, "scheme": "int4", "warmstart_seed": warm, "seed": seed}
            run["accuracy_trained"] = None if value is None else value / 100
            runs[f"{method}-{warm}-{seed}"] = run
    return {"runs": runs}


def test_runs_are_paired_by_warm_start_and_seed_whatever_their_order():
    study = told(
        a={(0, 0): 50, (0, 1): 60, (1, 0): 70, (1, 1): 80},
        b={(1, 0): 60, (0, 1): 59, (0, 0): 45, (1, 1): None, (2, 0): 10},
    )
    found = differences(study, ("a,int4", "b,int4"))
    assert found == pytest.approx({(0, 0): 5, (0, 1): 1, (1, 0): 10})
    assert by_warm_start(found).tolist() == pytest.approx([3, 10])
    # A difference in differences: (a - b) - (b - a) is twice the difference.
    arms = ("a,int4", "b,int4", "b,int4", "a,int4")
    assert list(differences(study, arms).values()) == pytest.approx([10, 2, 20])


def test_intervals_and_claims_by_hand():
    values = np.array([1.0, 2.0, 3.0])  # mean 2, standard error 1 / sqrt(3), 2 degrees of freedom
    error = 1 / math.sqrt(3)
    assert mean_interval(values) == (pytest.approx(2.0), pytest.approx(4.303 * error, rel=1e-3))
    assert upper_bound(values) == pytest.approx(2 + 2.920 * error, rel=1e-3)
    for test, t, sides in (("different", 2 / error, 2), ("not inferior", 5 / error, 1)):
        assert p_value(values, test) == pytest.approx(sides * stats.t.sf(t, 2))
    # Of the two sides of +- 3, the mean of 2 is nearer to the upper one.
    assert p_value(values, "equivalent") == pytest.approx(stats.t.sf(1 / error, 2))
    assert p_value(-values, "equivalent") == p_value(values, "equivalent")
    assert p_value(-values, "not inferior") == p_value(values, "equivalent")


def test_holm_multiplies_the_smallest_by_all_the_next_by_the_rest_and_never_falls():
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.5, 0.6]) == [1.0, 1.0]


def test_the_log_rank_test_counts_runs_that_never_collapse_as_censored():
    # Of 2 + 2 runs one collapses, at step 10: expected 1/2 in each arm, variance 1/4: chi2 = 1.
    assert log_rank([10, None], [None, None], 40) == pytest.approx(stats.chi2.sf(1, 1))
    assert log_rank([None], [None], 40) == 1.0


def test_a_comparison_that_is_still_to_come_counts_in_the_correction():
    places = [(warm, seed) for warm in (0, 1) for seed in (0, 1, 2)]
    study = told(a={place: 50 + i for i, place in enumerate(places)}, b=dict.fromkeys(places, 50))
    planned = (
        Contrast("a - b", ("a,int4", "b,int4"), "different"),
        Contrast("a - c", ("a,int4", "c,int4"), "equivalent"),
    )
    lines = comparisons(study, planned)
    p = p_value(np.arange(6.0), "different")
    # The models' means are 1 and 4: +- 12.706 x 1.5.
    measured = "| a - b | 6 | +2.5 ± 2.0 | +2.5 ± 19.1 | different"
    assert lines[2:] == [f"{measured} | {p:.3f} | {2 * p:.3f} |"]


def test_a_dose_says_whether_an_outcome_is_run():
    shares = {"low": [1e-4, 2e-4, 3e-4], "wide": [0.0, 0.0, 2e-3], "high": [0.01, 0.02, 0.03]}
    groups, methods = {}, {}
    for method, values in shares.items():
        share = {"mean": sum(values) / 3, "values": values}
        groups[f"{method},int4"] = {"acr_gradient_share": share}
        methods[method] = {"label": method}
    lines = doses({"groups": groups, "methods": methods})[2:]
    # 2e-4 + 2.92 x 1e-4 / sqrt(3)
    assert lines[0] == "| low | INT4 | 3 | 0.0002 | 0.00037 | ACR is TIS here |"
    assert lines[1].endswith("| no outcome is run |")
    assert lines[2].endswith("| TIS, ACR and placebo |")


def test_the_planned_arms_are_those_of_the_study_file():
    study = read_study(STUDIES / "one_block.toml")
    places: dict[str, set] = {}
    for cell in study.cells:
        place = (cell.warmstart_seed, cell.seed)
        places.setdefault(f"{cell.method},{cell.scheme}", set()).add(place)
    pairs = [len(set.intersection(*(places[arm] for arm in one.arms))) for one in PRIMARY]
    assert pairs == [32, 24, 24, 24, 24, 24]
    page = (DOCS / "results/preregistered.md").read_text(encoding="utf-8")
    for name in ("dose_sort", "dose_spiral", "one_block", "hard"):
        assert f"launch/studies/{name}.toml" in page
        assert f"{len(read_study(STUDIES / f'{name}.toml').cells)} runs" in page
