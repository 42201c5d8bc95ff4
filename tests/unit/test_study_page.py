"""Pages made from a study: their tables are those of its record. And the tests that are planned."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.mismatch_page import kept
from benchmarks.paired import (
    Contrast,
    comparisons,
    differences,
    holm,
    log_rank,
    mean_interval,
    p_value,
    upper_bound,
)
from benchmarks.study_page import DOCS, TABLES, pages


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
    assert found.tolist() == pytest.approx([5, 1, 10])
    # A difference in differences: (a - b) - (b - a) is twice the difference.
    arms = ("a,int4", "b,int4", "b,int4", "a,int4")
    assert differences(study, arms).tolist() == pytest.approx([10, 2, 20])


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
    study = told(a={(0, s): 50 + s for s in range(6)}, b={(0, s): 50 for s in range(6)})
    planned = (
        Contrast("a - b", ("a,int4", "b,int4"), "different"),
        Contrast("a - c", ("a,int4", "c,int4"), "equivalent"),
    )
    lines = comparisons(study, planned)
    p = p_value(np.arange(6.0), "different")
    assert lines[2:] == [f"| a - b | 6 | +2.5 ± 2.0 | different | {p:.3f} | {2 * p:.3f} |"]
