import io

import pytest

from qurl_megatron.observe.progress import Progress
from qurl_megatron.observe.text import duration, number, percent, reading

METRICS = {
    "reward/mean": 0.41234,
    "policy/clip_fraction": 0.0031,
    "rollout/kl_k1": -0.0005,
    "rollout/kl_k3": 0.00123,
    "quant/code_flip_rate": 0.0412,
    "throughput/rollout_tokens_per_s": 811.7,
    "time/step": 2.31,
    "optimizer/lr": 1e-6,
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_one_plain_line_per_step():
    stream, clock = io.StringIO(), Clock()
    with Progress(60, 10, stream=stream, clock=clock) as progress:
        for step in (11, 12):
            progress.phase("rollout")
            clock.now += 110 / 48
            progress.step(step, METRICS)
    assert stream.getvalue().splitlines()[-1] == (
        "step 12/60  reward 0.412  clip 0.3 %  k3 0.00123  flips 4.1 %  812 tok/s  2.29 s  "
        "eta 1m50s"
    )
    explained, *steps = stream.getvalue().splitlines()
    assert explained.startswith("clip: share of tokens") and len(steps) == 2


def test_the_line_leaves_out_what_was_not_measured_and_the_last_one_has_no_eta():
    stream = io.StringIO()
    with Progress(2, stream=stream) as progress:
        progress.step(0, {"eval/accuracy": 0.125})
        progress.step(1, {"reward/mean": 0.5, "reward/failed_fraction": 0.19})
        progress.step(2, {"reward/mean": 1.0, "reward/failed_fraction": 0.0})
    first, unscored, last = stream.getvalue().splitlines()
    assert first == "step 0/2  eval 12.5 %" and last == "step 2/2  reward 1.000"
    assert "  reward 0.500  unscored 19.0 %" in unscored


def test_eta_follows_the_recent_pace_and_ignores_the_evaluation_before_training():
    stream, clock = io.StringIO(), Clock()
    with Progress(100, stream=stream, clock=clock) as progress:
        clock.now = 500.0
        progress.step(0, {"eval/accuracy": 0.1})
        assert "eta" not in stream.getvalue()
        for step in range(1, 51):
            clock.now += 9.0 if step < 20 else 2.0
            progress.step(step, {})
    assert stream.getvalue().endswith("step 50/100  eta 1m40s\n")


def test_seconds_and_eta_are_of_the_same_time_and_starting_up_is_no_part_of_it():
    """time/step leaves out saving and evaluating, and the first step follows a start of 30 s."""
    stream, clock = io.StringIO(), Clock()
    with Progress(41, stream=stream, clock=clock) as progress:
        clock.now = 30.0
        for step, seconds in ((1, 4.0), (2, 6.0)):
            progress.begin()
            clock.now += seconds
            progress.step(step, {"time/step": 0.88})
    assert stream.getvalue().splitlines() == [
        "step 1/41  4.00 s  eta 2m40s",
        "step 2/41  6.00 s  eta 3m15s",
    ]


def test_a_terminal_shows_the_same_lines_and_below_them_the_phase(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    with Progress(60, 11, stream=stream) as progress:
        progress.step(12, METRICS)
        progress.step(13, METRICS)
        progress.alarm("guard, step 13: halted")
        progress.phase("publish")
        progress._display.refresh()
        shown = stream.getvalue()
    assert shown.count("flips: share of quantized weights whose code changed") == 1
    for text in ("step 12/60  reward 0.412", "812 tok/s", "eta", "step 13/60", "publish", "0:00"):
        assert text in shown


def test_a_failing_run_gives_the_terminal_back(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with pytest.raises(RuntimeError), Progress(3, stream=stream):
        raise RuntimeError
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")  # cursor


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.034, "0.03 s"), (2.314, "2.31 s"), (59.94, "59.9 s"), (59.96, "1m00s"), (110, "1m50s")]
    + [(3599.6, "1h00m"), (7500, "2h05m"), (180_000, "2d02h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_numbers():
    assert [percent(x) for x in (0, 0.0031, 0.00031, 1)] == ["0.0 %", "0.3 %", "0.03 %", "100.0 %"]
    assert [number(x) for x in (0, 42, 0.1234, -12.34, 1234.5)] == [
        "0", "42", "0.123", "−12.3", "1\u202f234",
    ]  # fmt: skip
    assert [number(x) for x in (2e-5, 1e-6, 3e9)] == ["2·10⁻⁵", "10⁻⁶", "3·10⁹"]
    assert reading("rollout/ess", 0.985) == "98.5\u202f%"
    assert reading("rollout/rho_mean", 1.0003) == "1.0003"
