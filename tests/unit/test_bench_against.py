import dataclasses
import random
import time

import pytest

from qurl_megatron.bench.against import compare, most_figures
from qurl_megatron.bench.options import BENCHMARKS
from qurl_megatron.bench.record import BenchRecord, Case, Figure
from qurl_megatron.bench.repeats import interleaved

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


def measured(draw: random.Random, *, slower: float = 1.0, noise: str = "even") -> BenchRecord:
    """One run of a benchmark of three cases, on a machine with 2 % of noise and more of it."""
    cases = []
    for number, scheme in enumerate(SCHEMES):
        # What the machine as a whole does, which the yardstick sees, too; and what it does not.
        machine = [draw.lognormvariate(0, 0.01) for _ in range(REPEATS)]
        if noise == "bursts":
            start = draw.randrange(REPEATS)
            for i in range(start, min(start + draw.randrange(1, 4), REPEATS)):
                machine[i] *= draw.uniform(1.3, 2)
        if noise == "drift":
            machine = [m * (1 + 0.12 * i / REPEATS) for i, m in enumerate(machine)]
        own = [1.0] * REPEATS
        if noise == "bursts that the yardstick misses":
            start = draw.randrange(REPEATS)
            for i in range(start, min(start + draw.randrange(1, 5), REPEATS)):
                own[i] *= draw.uniform(1.3, 2)
        if noise == "a tenth of jitter":
            own = [draw.lognormvariate(0, 0.1) for _ in range(REPEATS)]
        repeats = [(10 + number) * slower * m * draw.lognormvariate(0, 0.02) for m in machine]
        repeats = [r * o for r, o in zip(repeats, own, strict=True)]
        if noise == "an outlier":
            repeats[draw.randrange(REPEATS)] *= 3
        yardsticks = [0.01 * m * draw.lognormvariate(0, 0.01) for m in machine]
        cases.append(case(scheme, repeats, yardsticks))
    return record(*cases)


NOISES = (
    "even",
    "bursts",
    "drift",
    "an outlier",
    "a tenth of jitter",
    "bursts that the yardstick misses",
)


@pytest.mark.parametrize("noise", NOISES)
def test_noise_is_no_regression(noise):
    """Of 20,000 other seeds of the jitter 25 are false alarms; performance.md tells the rate."""
    draw = random.Random(noise)
    words = [
        compare(measured(draw, noise=noise), measured(draw, noise=noise)).word for _ in range(200)
    ]
    assert words.count("regression") == 0


@pytest.mark.parametrize("noise", ["even", "bursts", "drift", "an outlier"])
def test_a_tenth_slower_is_found(noise):
    draw = random.Random(noise)
    words = [
        compare(measured(draw, noise=noise), measured(draw, noise=noise, slower=1.1)).word
        for _ in range(200)
    ]
    assert words.count("regression") >= 195, words.count("regression")
    assert words.count("equal or better") == 0


def test_four_times_the_work_really_done_is_found():
    def busy(count: int) -> float:
        start = time.thread_time()  # CPU seconds: who else uses this machine does not matter much
        sum(i & 3 for i in range(count))
        return time.thread_time() - start

    work = {"old": 20_000, "new": 80_000}
    found = interleaved(
        {name: lambda count=count: busy(count) for name, count in work.items()},
        repeats=30,
        measure=lambda: 1.0,
    )
    old, new = (record(case("int8", found[name].results)) for name in work)
    assert compare(new, old).exit_code == 0
    assert compare(old, new).exit_code == 1


def test_equal_better_and_worse_have_exit_codes_0_0_and_1():
    even = [10 + i / 100 for i in range(REPEATS)]
    for factor, word, code in (
        (1.0, "equal", 0),
        (0.8, "better", 0),
        (1.02, "equal", 0),  # surely worse, and less than what matters
        (1.1, "regression", 1),
    ):
        found = compare(record(case("a", even)), record(case("a", [factor * x for x in even])))
        assert (found.compared[0].verdict, found.exit_code) == (word, code)
        assert found.looked_at == 1 and "1 figure compared" in found.text()


def test_a_rate_is_worse_when_it_falls():
    def rates(value: float) -> BenchRecord:
        repeats = [value + i / 100 for i in range(REPEATS)]
        rate = Figure(name="decode", unit="tokens/s", better="higher", repeats=repeats)
        return record(case("a", [], [1.0] * REPEATS, figures=[rate]))

    assert compare(rates(100), rates(90)).exit_code == 1
    assert compare(rates(90), rates(100)).exit_code == 0


def test_bytes_are_not_divided_by_the_yardstick():
    def memory(yardstick: float) -> BenchRecord:
        size = Figure(name="peak", unit="MiB", better="lower", repeats=[100.0] * REPEATS)
        return record(case("a", [], [yardstick] * REPEATS, figures=[size]))

    assert compare(memory(1.0), memory(2.0)).exit_code == 0


@pytest.mark.parametrize("unit", ["s", "CPU s", "core s", "GPU s"])
def test_seconds_of_any_device_are_divided_by_the_yardstick(unit):
    def cost(factor: float) -> BenchRecord:
        repeats = [factor * (10 + i / 100) for i in range(REPEATS)]
        seconds = Figure(name="cost", unit=unit, better="lower", repeats=repeats)
        return record(case("a", [], [factor] * REPEATS, figures=[seconds]))

    assert compare(cost(1.0), cost(1.08)).exit_code == 0  # the machine as a whole was slower


EVEN = case("a", [10 + i / 100 for i in range(REPEATS)])
WORSE = case("a", [20 + i / 100 for i in range(REPEATS)])


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (record(), record(), "0 figures compared"),
        (record(EVEN), record(), "the new record lacks it"),
        (record(EVEN), record(dataclasses.replace(EVEN, name="b")), "0 figures compared"),
        (record(EVEN), record(EVEN, benchmark="loss"), "bench decode, the other of bench loss"),
        (record(EVEN), record(WORSE, environment={"cpu": "other"}), "different hardware (cpu: so"),
        (record(EVEN), record(dataclasses.replace(WORSE, reasons=["failed"])), "failed"),
        (record(dataclasses.replace(WORSE, reasons=["another load"])), record(EVEN), "another l"),
        (
            record(EVEN),
            record(dataclasses.replace(WORSE, yardsticks=[1.5] * REPEATS)),
            "1.50 times as",
        ),
        (
            record(case("a", [10.0, 10.1])),
            record(case("a", [20.0, 20.1])),
            "2 repeats are too few for 1 figure; 5 in",
        ),
        (
            record(case("a", [10.0 + i / 100 for i in range(REPEATS)], keys={"tokens": 100})),
            record(case("a", [90.0 + i / 100 for i in range(REPEATS)], keys={"tokens": 10_000})),
            "it measured something else (tokens: 100 and 10000)",
        ),
        (
            record(dataclasses.replace(WORSE, keys={"model": "7B"})),
            record(dataclasses.replace(EVEN, keys={"model": "tiny", "steps": 4})),
            "something else (model: 7B and tiny, steps: None and 4)",
        ),
        (record(EVEN), record(case("a", [0.0, *range(1, REPEATS)])), "a repeat is 0"),
        (record(case("a", [0.0] * REPEATS)), record(case("a", [3.0] * REPEATS)), "a repeat is 0"),
        (
            record(case("a", [10, 14, 9, 13, 11, 12, 10])),
            record(case("a", [11, 15, 10, 13, 12, 13, 9])),
            "too noisy",
        ),
    ],
)
def test_what_cannot_be_compared_is_no_verdict_and_says_why(old, new, why):
    found = compare(old, new)
    assert found.exit_code == 3
    assert why in found.text()


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
    assert [each.verdict for each in slower.compared] == ["no verdict", "regression"]
    assert "read 55.5 GB/s then and 33.1 now" in slower.compared[0].why
    alike = compare(on(33.2, 1.0, 10.0), on(33.1, 1.4, 10.0))
    assert [each.verdict for each in alike.compared] == ["regression", "equal"]


def test_what_was_zero_and_is_zero_is_equal():
    nothing = record(case("a", [0.0] * REPEATS))
    found = compare(nothing, nothing)
    assert (found.exit_code, found.compared[0].verdict) == (0, "equal")


def told(name: str, value: float) -> Figure:
    return Figure(name=name, unit="%", better=None, repeats=[value + i for i in range(REPEATS)])


def test_a_figure_that_is_only_told_is_neither_compared_nor_counted_nor_missed():
    def with_more(value: float, *names: str) -> BenchRecord:
        return record(
            dataclasses.replace(EVEN, figures=[*EVEN.figures, *(told(n, value) for n in names)])
        )

    found = compare(with_more(10, "cache in use", "tail"), with_more(90, "cache in use"))
    assert (found.exit_code, found.looked_at) == (0, 1)
    assert "cache" not in found.text() and "tail" not in found.text()
    # An older record that took it for something to be compared changes nothing.
    old = Figure(name="tail", unit="s", better="lower", repeats=[1.0] * REPEATS)
    before = record(dataclasses.replace(EVEN, figures=[*EVEN.figures, old]))
    assert compare(before, with_more(90, "tail")).exit_code == 0
    assert told("tail", 1.0).share is None


def many(repeats: int, factor: float, *, cases: int = 3) -> BenchRecord:
    """As many figures as bench step may compare, by default of three cases. Of the first case one
    phase takes ``factor`` times as long."""
    figures = {
        (number, phase): Figure(
            name=f"phase {phase}",
            unit="s",
            better="lower",
            repeats=[(1.0 if number or phase else factor) * (10 + i / 100) for i in range(repeats)],
        )
        for number in range(cases)
        for phase in range(7)
    }
    return record(
        *(
            case(f"{n}", [], [1.0] * repeats, figures=[figures[n, phase] for phase in range(7)])
            for n in range(cases)
        )
    )


def test_too_few_repeats_for_so_many_figures_is_the_reason_and_not_noise():
    found = compare(many(6, 1.0), many(6, 2.0))
    assert found.exit_code == 3
    assert "6 repeats are too few for 21 figures; 8 in both records are enough" in found.text()
    assert "noisy" not in found.text()


@pytest.mark.parametrize("repeats", [5, 6, 7])
def test_so_many_figures_and_no_more_can_be_told_worse_with_so_few_repeats(repeats):
    def ends(figures: int) -> int:
        def of(factor: float) -> BenchRecord:
            values = [factor * (10 + i / 100) for i in range(repeats)]
            return record(*(case(str(number), values) for number in range(figures)))

        return compare(of(1.0), of(2.0)).exit_code

    most = most_figures(repeats)
    assert (ends(most), ends(most + 1)) == (1, 3)


@pytest.mark.parametrize("cases", [3, 10, 34])  # staleness, with some layouts, with many
def test_one_phase_twice_as_slow_is_a_regression_with_the_repeats_of_bench_step(cases):
    repeats = BENCHMARKS["step"].repeats
    old, new = (many(repeats, factor, cases=cases) for factor in (1.0, 2.0))
    assert compare(old, new).exit_code == 1


def test_what_could_be_run_on_neither_side_is_left_out():
    absent = case("liger", [], figures=[], reasons=["not run"])
    assert compare(record(EVEN, absent), record(EVEN, absent)).exit_code == 0


def test_one_regression_is_enough_beside_cases_without_a_verdict():
    gone = dataclasses.replace(EVEN, name="b")
    assert compare(record(EVEN, gone), record(WORSE)).exit_code == 1
