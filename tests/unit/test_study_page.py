"""Pages made from a study: their tables are those of its record. And the tests that are planned."""

import json
import math

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from scipy import stats

from benchmarks import study_pictures
from benchmarks.join_studies import joined
from benchmarks.join_studies import main as join
from benchmarks.mismatch_page import kept
from benchmarks.paired import (
    ANSWERS,
    EQ1,
    PRIMARY,
    PRIMARY_HARD,
    UNQUANTIZED,
    Contrast,
    against_kl,
    at_equal_seconds,
    by_warm_start,
    collapses,
    comparisons,
    differences,
    doses,
    gate,
    holm,
    log_rank,
    mean_interval,
    p_value,
    slope_on_kl,
    to_unquantized,
    upper_bound,
)
from benchmarks.study_page import DOCS, TABLES, pages
from benchmarks.study_pictures import IMAGES, MADE_OF, PICTURES, digest, png
from qurl_megatron.evaluation.study_plan import read_study
from qurl_megatron.evaluation.study_results import FINAL_NAMES

STUDIES = DOCS.parent / "launch/studies"


def test_the_tables_of_the_pages_are_made_of_the_records():
    """``python -m benchmarks.study_page`` writes them again."""
    for path, text in pages().items():
        assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_of_the_records_as_they_are(name):
    """``python -m benchmarks.study_page`` draws them again."""
    assert Image.open(IMAGES / name).text[MADE_OF] == digest(PICTURES[name].records)
    assert png(PICTURES[name]).startswith(b"\x89PNG")


def test_every_record_of_a_study_is_on_a_page():
    records = {path.name for path in DOCS.glob("results/*.json") if "groups" in json_of(path)}
    assert records <= {f"{name}.json" for _, names, _ in TABLES.values() for name in names}
    assert kept()  # those of docs/mismatch.md have rows instead, and a test of their own


def json_of(path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def record_of(**arms: dict[tuple[int, int], float | None]) -> dict:
    """A study.json; by method the accuracy of each (warm start, seed), in percent."""
    runs = {}
    for method, values in arms.items():
        for (warm, seed), value in values.items():
            run = {"method": method, "scheme": "int4", "warmstart_seed": warm, "seed": seed}
            run |= {"accuracy_trained": None, "state": "failed"}
            if value is not None:
                run |= {"accuracy_trained": value / 100, "state": "done"}
            runs[f"{method}-{warm}-{seed}"] = run
    return {"runs": runs}


def test_runs_are_paired_by_warm_start_and_seed_whatever_their_order():
    study = record_of(
        a={(0, 0): 50, (0, 1): 60, (1, 0): 70, (1, 1): 80},
        b={(1, 0): 60, (0, 1): 59, (0, 0): 45, (1, 1): None, (2, 0): 10},
    )
    found = differences(study, ("a,int4", "b,int4"))
    assert found == pytest.approx({(0, 0, 0): 5, (0, 0, 1): 1, (0, 1, 0): 10})
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
    study = record_of(
        a={place: 50 + i for i, place in enumerate(places)}, b=dict.fromkeys(places, 50)
    )
    planned = (
        Contrast("a - b", ("a,int4", "b,int4"), "different"),
        Contrast("a - c", ("a,int4", "c,int4"), "equivalent"),
    )
    lines = comparisons(study, planned)
    p = p_value(np.arange(6.0), "different")
    # The models' means are 1 and 4: +- 12.706 x 1.5.
    measured = "| a - b | 6 | +2.5 ± 2.0 | +2.5 ± 19.1 | different"
    assert lines[2:] == [f"{measured} | {p:.3f} | {2 * p:.3f} |"]


def test_an_arm_with_a_failed_run_is_not_called_equivalent():
    places = [(0, seed) for seed in range(4)]
    same = {place: 50 + i for i, place in enumerate(places)}
    b = {place: value + 0.1 * (i % 2) for i, (place, value) in enumerate(same.items())}
    planned = (Contrast("a - b", ("a,int4", "b,int4"), "equivalent"),)
    assert "| 0.000 | 0.000 |" in comparisons(record_of(a=same, b=b), planned)[2]
    lines = comparisons(record_of(a=same, b={**b, (1, 0): None}), planned)
    assert "| 4 | -0.0 ± 0.1 |" in lines[2] or "| 4 | -0.1 ± 0.1 |" in lines[2]
    assert lines[2].endswith("| 1.000 | 1.000 |") and lines[-1] == "Failed: b-1-0."


def test_a_dose_says_whether_an_outcome_is_run():
    shares = {"low": [1e-4, 2e-4, 3e-4], "wide": [0.0, 0.0, 2e-3], "high": [0.01, 0.02, 0.03]}
    groups, methods = {}, {}
    for method, values in shares.items():
        share = {"mean": sum(values) / 3, "values": values}
        groups[f"{method},int4"] = {"acr_gradient_share": share}
        methods[method] = {"label": method}
    lines = doses({"groups": groups, "methods": methods})[2:]
    # 2e-4 + 2.92 x 1e-4 / sqrt(3)
    assert lines[0] == "| low | INT4 | 3 | 0.0002 | 0.000369 | ACR is TIS here |"
    assert lines[1].endswith("| no outcome is run |")
    assert lines[2].endswith("| TIS, ACR and placebo |")


def of_arms(arms: dict[str, list[dict]], kl: dict[str, float] | None = None) -> dict:
    """A study.json with these runs of METHOD,SCHEME, their seeds counted from 0."""
    runs, groups = {}, {}
    for arm, members in arms.items():
        method, scheme = arm.split(",")
        for seed, numbers in enumerate(members):
            place = {"method": method, "scheme": scheme, "warmstart_seed": 0, "seed": seed}
            runs[f"{arm}-{seed}"] = place | {"state": "done"} | numbers
        groups[arm] = {"kl_mean": {"mean": (kl or {}).get(arm, 0.0)}}
    methods = {arm.split(",")[0]: {"label": arm.split(",")[0]} for arm in arms}
    return {"runs": runs, "groups": groups, "methods": methods}


def trained(*percents: float) -> list[dict]:
    return [{"accuracy_trained": value / 100} for value in percents]


def test_what_is_not_corrected_falls_with_the_logarithm_of_its_kl():
    study = of_arms(
        {
            UNQUANTIZED: trained(80, 90),
            "proximal,int8": trained(80, 89),  # 0 and -1 at 1e-3
            "proximal,int4": trained(70, 83),  # -10 and -7 at 1e-1
        },
        kl={"proximal,int8": 1e-3, "proximal,int4": 1e-1},
    )
    assert slope_on_kl(study) == pytest.approx([-5, -3])
    intervals = against_kl(study)[2:]
    assert intervals[0] == "| INT8 | 0.001 | 2 | -0.5 ± 6.4 |"  # 12.706 / 2
    assert intervals[-1] == "Slope: -4.0 ± 12.7 points for each factor of ten in KL."
    axes = Figure().add_subplot()
    study_pictures.against_kl(axes, [study])
    places = {text.get_text(): tuple(text.xy) for text in axes.texts}
    assert places["INT8"] == pytest.approx((1e-3, -0.5))
    assert places["INT4"] == pytest.approx((1e-1, -8.5))
    table = to_unquantized(study)
    assert len(table) == 4 and "| proximal | INT4 | 2 | -8.5 ±" in table[3]


def test_arms_are_compared_at_the_seconds_in_which_the_fastest_has_done_its_steps():
    curve = {"eval/accuracy": {"steps": [0, 10, 20, 40], "values": [0.1, 0.2, 0.4, 0.8]}}
    study = of_arms({EQ1: [{"curves": curve}] * 2, "tis,int4": [{"curves": curve}] * 2})
    alone = {
        "groups": {
            EQ1: {"step_seconds": {"mean": 2.0}},  # 40 steps in 80 s
            "tis,int4": {"step_seconds": {"mean": 3.2}},  # of which it does 25: between 40 and 80 %
        }
    }
    assert at_equal_seconds(study, alone)[2:] == [
        "| proximal | 2.00 | 40.0 | 80.0 | – |",
        "| tis | 3.20 | 25.0 | 50.0 | -30.0 ± 0.0 |",
    ]


def test_the_gate_is_of_the_unquantized_runs_of_the_first_seed():
    gains = [(0.10, 0.45), (0.20, 0.30)]
    runs = [{"accuracy_before": before, "accuracy": after} for before, after in gains]
    study = of_arms({UNQUANTIZED: runs, EQ1: runs})
    assert gate(study)[0].endswith("gained 35.")  # the second is of another seed


def test_collapses_of_each_answer_are_tested_against_none():
    fell, stood = {"collapse_step": 5}, {"collapse_step": None}
    arms = {arm: [stood] * 12 for arm in ANSWERS.values()}
    table = collapses(of_arms({EQ1: [fell] * 12} | arms))
    p = 5 * log_rank([None] * 12, [5] * 12, 40)
    assert table[2] == f"| TIS | 0 | 12 | {p:.3f} |"
    assert table[-1] == "| Eq. 1 | 12 | 12 | – |"


def test_the_planned_arms_are_those_of_the_study_file():
    study = read_study(STUDIES / "one_block.toml")
    places: dict[str, set] = {}
    for cell in study.cells:
        place = (cell.warmstart_seed, cell.seed)
        places.setdefault(f"{cell.method},{cell.scheme}", set()).add(place)
    pairs = [len(set.intersection(*(places[arm] for arm in one.arms))) for one in PRIMARY]
    assert pairs == [32, 24, 24, 24, 24, 24]
    hard = read_study(STUDIES / "hard.toml")
    arms = {f"{cell.method},{cell.scheme}" for cell in hard.cells}
    assert arms == {UNQUANTIZED, EQ1, *ANSWERS.values()}
    assert {arm for one in PRIMARY_HARD for arm in one.arms} == arms - {UNQUANTIZED}
    page = (DOCS / "results/preregistered.md").read_text(encoding="utf-8")
    for name in ("dose_sort", "dose_spiral", "one_block", "hard"):
        assert f"launch/studies/{name}.toml" in page
        assert f"{len(read_study(STUDIES / f'{name}.toml').cells)} runs" in page


def part_of(done: dict[str, float | None], machine: str) -> dict:
    """study.json of two arms with one pair each on two models, of which these runs have ended."""
    runs = {}
    for method, warm in (("a", 0), ("b", 0), ("a", 1), ("b", 1)):
        name = f"{method}-{warm}"
        run = {"method": method, "scheme": "int4", "warmstart_seed": warm, "seed": 0}
        run["state"] = "waiting"
        if name in done:
            finals = dict.fromkeys(FINAL_NAMES) | {"accuracy_trained": done[name]}
            run |= {"state": "done" if done[name] else "failed"} | finals
        runs[name] = run
    groups = {f"{method},int4": {"planned": 2, "done": 0} for method in "ab"}
    settings = {"name": "study", "recipe": {}, "methods": {}, "environment": machine}
    return {**settings, "runs": runs, "groups": groups}


def test_parts_of_a_study_are_joined_and_a_pair_is_of_one_part():
    first = joined(None, part_of({"a-0": 0.5, "b-0": 0.4, "a-1": 0.9}, "one"))
    assert first["runs"]["b-1"]["state"] == "waiting"
    both = joined(first, part_of({"b-1": 0.2}, "two"))
    assert both["environments"] == ["one", "two"]
    assert [run["state"] for run in both["runs"].values()] == ["done"] * 4
    assert both["groups"]["b,int4"]["accuracy_trained"]["values"] == [0.4, 0.2]
    assert both["groups"]["b,int4"]["done"] == both["groups"]["b,int4"]["planned"] == 2
    # The second model of b was made on another machine than that of a.
    found = differences(both, ("a,int4", "b,int4"))
    assert found == pytest.approx({(0, 0, 0): 10})


def test_a_run_that_has_ended_twice_or_a_record_of_another_study_is_not_joined(tmp_path, capsys):
    record, part = tmp_path / "record.json", tmp_path / "study.json"
    part.write_text(json.dumps(part_of({"a-0": 0.5, "b-0": None}, "one")))
    assert join([str(record), str(part)]) == 0
    assert "2 of 4 runs have ended" in capsys.readouterr().out
    before = record.read_bytes()
    assert join([str(record), str(part)]) == 2
    assert "a-0 has ended in both records; leave it out of one" in capsys.readouterr().err
    part.write_text(json.dumps(part_of({"a-1": 0.5}, "two") | {"recipe": {"lr": 1}}))
    assert join([str(record), str(part)]) == 2
    assert "the records differ in their recipe" in capsys.readouterr().err
    assert record.read_bytes() == before


def test_another_json_file_is_no_part_of_a_study(tmp_path, capsys):
    record, part = tmp_path / "record.json", tmp_path / "study.json"
    part.write_text('{"name": "study"}')
    assert join([str(record), str(part)]) == 2
    assert "lacks runs, groups or environment;" in capsys.readouterr().err
    assert join([str(record), str(tmp_path / "missing.json")]) == 2
    assert "missing.json is missing" in capsys.readouterr().err
    assert not record.exists()
