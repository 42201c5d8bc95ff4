import dataclasses

import pytest

from benchmarks.against import EXIT_CODES, compare, main, verdict_of
from qurl_megatron.bench.record import BenchRecord, Case, Figure

REPEATS = 10


def record(*cases: Case, **given) -> BenchRecord:
    environment = {"cpu": "some", "cores": 2, "instructions": ["AVX-512"], "gpus": []}
    return BenchRecord(
        **{
            "benchmark": "decode",
            "command": "qurl bench decode",
            "started": "2026-11-22T12:00:00+00:00",
            "environment": environment,
            "cases": list(cases),
            **given,
        }
    )


def case(name: str, repeats: list[float], yardsticks: list[float] | None = None, **given) -> Case:
    figures = [Figure(name="decode", unit="ms", better="lower", repeats=repeats)] if repeats else []
    yardsticks = yardsticks or [1.0] * len(repeats)
    return Case(**{"name": name, "keys": {}, "figures": figures, "yardsticks": yardsticks, **given})


@pytest.mark.parametrize(
    ("factor", "verdict", "exit_code"),
    [
        (1.0, "equal", 0),
        (0.8, "better", 0),
        (1.02, "equal", 0),  # surely worse, and less than what matters
        (1.1, "regression", 1),
    ],
)
def test_equal_better_and_worse_have_exit_codes_0_0_and_1(
    factor, verdict, exit_code, tmp_path, capsys
):
    even = [10 + i / 100 for i in range(REPEATS)]
    for name, repeats in (("old", even), ("new", [factor * x for x in even])):
        record(case("a", repeats)).keep(tmp_path / name)
    words = [str(tmp_path / name / "decode.json") for name in ("old", "new")]
    assert main(words) == exit_code
    assert f"a: decode  {factor:.3f} {verdict}\n" in capsys.readouterr().out
    assert main([words[0], str(tmp_path / "none.json")]) == 2


def test_seconds_are_divided_by_the_yardstick():
    slower = case("a", [1.08 * (10 + i / 100) for i in range(REPEATS)], [1.08] * REPEATS)
    assert EXIT_CODES[verdict_of(compare(record(EVEN), record(slower)))] == 0


EVEN = case("a", [10 + i / 100 for i in range(REPEATS)])
WORSE = case("a", [20 + i / 100 for i in range(REPEATS)])


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (record(EVEN), record(), "the new record lacks it"),
        (record(EVEN), record(EVEN, benchmark="loss"), "decode and loss"),
        (record(EVEN), record(WORSE, environment={"cpu": "other"}), "different hardware (cpu: so"),
        (record(EVEN), record(dataclasses.replace(WORSE, reasons=["failed"])), "failed"),
        (record(EVEN), record(dataclasses.replace(WORSE, yardsticks=[1.5] * 10)), "1.50 times as"),
        (
            record(case("a", [10.0, 10.1])),
            record(case("a", [20.0, 20.1])),
            "2 repeats are too few for 1 figures",
        ),
        (
            record(dataclasses.replace(WORSE, keys={"model": "7B"})),
            record(dataclasses.replace(EVEN, keys={"model": "tiny", "steps": 4})),
            "something else (model: 7B and tiny, steps: None and 4)",
        ),
        (record(EVEN), record(case("a", [0.0, *range(1, REPEATS)])), "a repeat is 0"),
        (
            record(case("a", [10, 14, 9, 13, 11, 12, 10])),
            record(case("a", [11, 15, 10, 13, 12, 13, 9])),
            "too noisy",
        ),
    ],
)
def test_what_cannot_be_compared_is_no_verdict_and_says_why(old, new, why):
    compared = compare(old, new)
    assert verdict_of(compared) == "no verdict" and EXIT_CODES["no verdict"] == 3
    assert any(why in each.line() for each in compared)
