import json

import pytest

from qurl_megatron.cluster.cluster import JobConfig
from qurl_megatron.cluster.pace import (
    GLANCE_S,
    MARGIN_S,
    Pace,
    Stillness,
    due,
    measured,
    progress_mark,
)

LIMITS = JobConfig(hung_s=1800, hung_steps=10.0)
END = 10_000.0


def step(number: int, at: float, seconds: float) -> str:
    return json.dumps({"step": number, "time": at, "metrics": {"time/step": seconds}}) + "\n"


def span(name: str, start: float, end: float) -> str:
    return json.dumps({"lane": "trainer", "name": name, "step": 1, "start": start, "end": end})


def test_nothing_is_known_of_a_run_that_has_not_begun(tmp_path):
    pace = measured(tmp_path, since=0.0)
    assert pace == Pace()
    assert pace.stop_s is None
    assert pace.patience_s(LIMITS) == 1800
    assert progress_mark(tmp_path) == (0, "")


def test_the_longest_step_and_save_say_when_to_stop():
    assert Pace((10.0, 40.0, 10.0), (5.0, 7.0)).stop_s == 47.0 + MARGIN_S
    assert Pace((10.0,), ()).stop_s is None


def test_a_run_is_stuck_after_ten_median_steps_or_the_floor_whichever_is_longer():
    pace = Pace((200.0, 300.0, 9000.0))
    assert pace.patience_s(LIMITS) == 3000
    assert Pace((20.0,)).patience_s(LIMITS) == 1800


def test_a_step_takes_what_lies_between_two_lines_evaluation_included(tmp_path):
    lines = [step(0, 990.0, 0.0), step(1, 1000.0, 9.0), step(2, 1050.0, 10.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    (tmp_path / "timeline.jsonl").write_text(
        f"{span('train', 990, 998)}\n{span('save', 1000, 1004.5)}\n"
    )
    assert measured(tmp_path, since=900.0) == Pace((0.0, 10.0, 50.0), (4.5,))


def test_a_night_in_the_queue_is_no_step(tmp_path):
    lines = [step(1, 1000.0, 9.0), step(2, 50_000.0, 10.0), step(3, 50_012.0, 10.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert measured(tmp_path, since=49_000.0).steps == (9.0, 10.0, 12.0)


@pytest.mark.parametrize("line", ["{", "[]", '{"step": 1}', "\0", '{"time": 1, "metrics": 3}'])
def test_lines_that_are_damaged_are_not_measured(line, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(line + "\n" + step(2, 0.0, 3.0) + '{"step": 3, "ti')
    (tmp_path / "timeline.jsonl").write_text(line + "\n")
    assert measured(tmp_path, since=0.0) == Pace((3.0,), ())


def test_of_a_long_file_only_its_end_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("qurl_megatron.cluster.pace.TAIL", 200)
    (tmp_path / "metrics.jsonl").write_text("".join(step(n, n, n) for n in range(100)))
    assert measured(tmp_path, since=1e9).steps[-1] == 99.0
    assert len(measured(tmp_path, since=1e9).steps) < 5


def test_every_step_and_every_checkpoint_is_a_sign_of_life(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(step(1, 0.0, 1.0))
    first = progress_mark(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(step(1, 0.0, 1.0) + step(2, 0.0, 1.0))
    second = progress_mark(tmp_path)
    checkpoint = tmp_path / "checkpoints/step_000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    assert len({first, second, progress_mark(tmp_path)}) == 3


def test_time_for_which_the_watcher_was_itself_suspended_is_not_stillness():
    clock = iter([0.0, 1.0, 2.0, 602.0, 603.0])
    still = Stillness(lambda: next(clock))
    assert [still.seconds() for _ in range(4)] == [1.0, 2.0, 2.0 + GLANCE_S, 3.0 + GLANCE_S]


def test_stillness_ends_with_a_step():
    clock = iter([0.0, 1.0, 2.0])
    still = Stillness(lambda: next(clock))
    still.seconds()
    still.moved()
    assert still.seconds() == 1.0


def test_a_step_that_would_have_counted_as_hung_was_suspended_and_is_no_measure():
    pace = Pace((10.0, 7200.0, 12.0), (5.0, 7300.0))
    assert pace.without_pauses(LIMITS) == Pace((10.0, 12.0), (5.0,))
    slow = Pace((3000.0, 2000.0), (5.0,))
    assert slow.without_pauses(LIMITS) == slow


@pytest.mark.parametrize(
    ("left", "stop_s", "received", "reason"),
    [
        pytest.param(5000, 100, "", "", id="nothing yet"),
        pytest.param(101, 100, "", "", id="just before"),
        pytest.param(100, 100, "", "USR1", id="just in time, without a signal"),
        pytest.param(2000, 2000, "", "USR1", id="long steps: before Slurm's signal"),
        pytest.param(900, 100, "USR1", "", id="short steps: Slurm's signal is put off"),
        pytest.param(950, 100, "USR1", "", id="also where it is early"),
        pytest.param(100, 100, "USR1", "USR1", id="until they must"),
        pytest.param(900, None, "USR1", "USR1", id="nothing measured: Slurm's signal counts"),
        pytest.param(10, None, "", "", id="nothing measured, no signal"),
        pytest.param(5000, 100, "USR1", "USR1", id="a signal at another time is somebody's"),
        pytest.param(5000, 100, "TERM", "TERM", id="cancelled"),
        pytest.param(900, 100, "TERM", "TERM", id="cancelled in the last minutes"),
    ],
)
def test_when_the_ranks_are_told_to_end(left, stop_s, received, reason):
    assert due(END - left, received, end=END, stop_s=stop_s, signal_s=900) == reason


def test_preemption_does_not_wait():
    reason = due(END - 900, "USR1", end=END, stop_s=100, signal_s=900, preempted=True)
    assert reason == "preempted"


@pytest.mark.parametrize("received", ["USR1", ""])
def test_where_slurm_does_not_say_when_the_job_ends_its_signal_counts(received):
    assert due(0.0, received, end=None, stop_s=100, signal_s=900) == received
