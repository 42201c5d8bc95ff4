import json

import pytest

from qurl_megatron.cluster.pace import MARGIN_S, SEEN_S, Pace, Stillness, mark, measured


def step(number: int, at: float, seconds: float) -> str:
    return json.dumps({"step": number, "time": at, "metrics": {"time/step": seconds}}) + "\n"


def span(name: str, start: float, end: float) -> str:
    return json.dumps({"lane": "trainer", "name": name, "step": 1, "start": start, "end": end})


def test_nothing_is_known_of_a_run_that_has_not_begun(tmp_path):
    pace = measured(tmp_path, since=0.0)
    assert pace == Pace()
    assert pace.stop_s is None
    assert pace.patience_s(1800, 10) == 1800
    assert mark(tmp_path) == (0, "")


def test_the_longest_step_and_save_say_when_to_stop():
    assert Pace((10.0, 40.0, 10.0), (5.0, 7.0)).stop_s == 47.0 + MARGIN_S
    assert Pace((10.0,), ()).stop_s is None


def test_a_run_is_stuck_after_ten_median_steps_or_the_floor_whichever_is_longer():
    pace = Pace((200.0, 300.0, 9000.0))
    assert pace.patience_s(1800, 10) == 3000
    assert pace.patience_s(3600, 10) == 3600


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
    first = mark(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(step(1, 0.0, 1.0) + step(2, 0.0, 1.0))
    second = mark(tmp_path)
    checkpoint = tmp_path / "checkpoints/step_000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    assert len({first, second, mark(tmp_path)}) == 3


def test_time_for_which_the_watcher_was_itself_suspended_is_not_stillness():
    clock = iter([0.0, 1.0, 2.0, 602.0, 603.0])
    still = Stillness(lambda: next(clock))
    assert [still.seconds() for _ in range(4)] == [1.0, 2.0, 2.0 + SEEN_S, 3.0 + SEEN_S]


def test_stillness_ends_with_a_step():
    clock = iter([0.0, 1.0, 2.0, 3.0])
    still = Stillness(lambda: next(clock))
    still.seconds()
    still.moved()
    assert still.seconds() == 1.0


def test_a_step_that_would_have_counted_as_hung_was_suspended_and_is_no_measure():
    pace = Pace((10.0, 7200.0, 12.0), (5.0, 7300.0))
    assert pace.without_pauses(1800, 10.0) == Pace((10.0, 12.0), (5.0,))
    slow = Pace((3000.0, 2000.0), (5.0,))
    assert slow.without_pauses(1800, 10.0) == slow
