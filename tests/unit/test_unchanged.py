"""The comparison of two commits reports what differs, and nothing else."""

from tests.unchanged import differences


def test_a_value_that_is_new_gone_or_other_is_a_difference():
    before = {"a": 1, "b": 0.1, "c": "x", "e": None}
    after = {"a": 1, "b": 0.1000000000000001, "d": 2, "e": None}
    assert differences(before, after) == [
        "b: 0.1 before, 0.1000000000000001 now",
        "c: x before, absent now",
        "d: absent before, 2 now",
    ]
