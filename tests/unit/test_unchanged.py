"""The comparison of two commits reports what differs, and nothing else."""

import json

from tests.unchanged import _metrics, differences


def test_a_value_that_is_new_gone_or_other_is_a_difference():
    before = {"a": 1, "b": 0.1, "c": "x", "e": None}
    after = {"a": 1, "b": 0.1000000000000001, "d": 2, "e": None}
    assert differences(before, after) == [
        "b: 0.1 before, 0.1000000000000001 now",
        "c: x before, absent now",
        "d: absent before, 2 now",
    ]


def test_a_step_that_is_done_again_counts_once_and_seconds_do_not(tmp_path):
    steps = [(1, 0.5), (2, 0.7), (2, 0.6)]
    lines = [
        json.dumps({"step": step, "metrics": {"reward/mean": reward, "time/step": 1.0}})
        for step, reward in steps
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert _metrics(tmp_path) == {"step 1: reward/mean": 0.5, "step 2: reward/mean": 0.6}
