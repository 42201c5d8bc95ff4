import dataclasses
import random

import pytest

from benchmarks.against import EXIT_CODES, compare, main, verdict_of
from qurl_megatron.bench.record import BenchRecord, Case, Figure

REPEATS = 10
SCHEMES = ("bf16", "int8", "fp8")


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


def measured(draw: random.Random, *, slower: float = 1.0, bursts: bool = False) -> BenchRecord:
    """One run of a benchmark of three cases, on a machine with 2 % of noise and more of it."""
    cases = []
    for number, scheme in enumerate(SCHEMES):
        # What the machine as a whole does, which the yardstick sees, too.
        machine = [draw.lognormvariate(0, 0.01) for _ in range(REPEATS)]
        if bursts:
            start = draw.randrange(REPEATS)
            for i in range(start, min(start + draw.randrange(1, 4), REPEATS)):
                machine[i] *= draw.uniform(1.3, 2)
        repeats = [(10 + number) * slower * m * draw.lognormvariate(0, 0.02) for m in machine]
        yardsticks = [0.01 * m * draw.lognormvariate(0, 0.01) for m in machine]
        cases.append(case(scheme, repeats, yardsticks))
    return record(*cases)


def word(old: BenchRecord, new: BenchRecord) -> str:
    return verdict_of(compare(old, new))


def code(old: BenchRecord, new: BenchRecord) -> int:
    return EXIT_CODES[word(old, new)]


@pytest.mark.parametrize("bursts", [False, True])
def test_noise_is_no_regression_and_a_tenth_slower_is_one(bursts):
    draw = random.Random(0)
    words: dict[float, list[str]] = {1.0: [], 1.1: []}
    for slower in [*words] * 200:
        new = measured(draw, bursts=bursts, slower=slower)
        words[slower].append(word(measured(draw, bursts=bursts), new))
    assert words[1.0].count("regression") == 0
    assert words[1.1].count("regression") >= 195
    assert words[1.1].count("equal or better") == 0


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
    assert code(record(EVEN), record(slower)) == 0


EVEN = case("a", [10 + i / 100 for i in range(REPEATS)])
WORSE = case("a", [20 + i / 100 for i in range(REPEATS)])


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (record(EVEN), record(), "the new record lacks it"),
        (record(EVEN), record(EVEN, benchmark="loss"), "decode and loss"),
        (record(EVEN), record(WORSE, environment={"cpu": "other"}), "different hardware (cpu: so"),
        (record(EVEN), record(dataclasses.replace(WORSE, reasons=["failed"])), "failed"),
        (
            record(EVEN),
            record(dataclasses.replace(WORSE, yardsticks=[1.5] * REPEATS)),
            "1.50 times as",
        ),
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


def test_times_of_a_machine_whose_memory_was_slower_are_no_verdict_but_bytes_are():
    def on(read_gb_s: float, seconds: float, mib: float) -> BenchRecord:
        figures = [
            Figure(name="decode", unit="s", better="lower", repeats=[seconds] * 10),
            Figure(name="peak", unit="MiB", better="lower", repeats=[mib] * 10),
        ]
        found = record(case("int8", [], figures=figures, yardsticks=[1.0] * 10))
        found.environment["limits"] = {"read_gb_s": read_gb_s, "int8_gop_s": 745.0}
        return found

    slower = compare(on(55.5, 1.0, 10.0), on(33.1, 1.4, 12.0))
    assert [each.verdict for each in slower] == ["no verdict", "regression"]
    assert "read 55.5 GB/s then and 33.1 now" in slower[0].why
    alike = compare(on(33.2, 1.0, 10.0), on(33.1, 1.4, 10.0))
    assert [each.verdict for each in alike] == ["regression", "equal"]


def test_a_figure_that_is_only_told_is_neither_compared_nor_missed():
    def with_tail(value: float, better=None) -> BenchRecord:
        repeats = [value + i for i in range(REPEATS)]
        tail = Figure(name="tail", unit="%", better=better, repeats=repeats)
        return record(dataclasses.replace(EVEN, figures=[*EVEN.figures, tail]))

    for old in (with_tail(10), with_tail(10, "lower"), record(EVEN)):
        (compared,) = compare(old, with_tail(90))
        assert (compared.name, compared.verdict) == ("a: decode", "equal")
