import json
import math
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.sinks import JsonlSink, TensorBoardSink, WandbSink, read_metrics
from tests.support.disks import fill, small_disk
from tests.support.examples import example


def _write(path, steps, **sink_args):
    sink = JsonlSink(path, **sink_args)
    for step in steps:
        sink.write(step, {"reward/mean": step / 10})
    sink.close()


def _steps(path):
    return [record.step for record in read_metrics(path)]


def test_resuming_replaces_the_steps_that_the_checkpoint_does_not_know(tmp_path):
    path = tmp_path / "m.jsonl"
    _write(path, range(6))
    assert JsonlSink(path, resume_step=5).last_step == 4
    _write(path, [4, 5, 6], resume_step=4)
    assert _steps(path) == [0, 1, 2, 3, 4, 5, 6]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"]


def test_an_evaluation_that_is_made_again_replaces_the_one_there_is(tmp_path):
    path = tmp_path / "m.jsonl"
    for evaluates in (False, True):
        sink = JsonlSink(path, resume_step=3 if evaluates else 0, evaluates=evaluates)
        for step in () if evaluates else (1, 2, 3):
            sink.write(step, {"reward/mean": 0.5, "eval/x": 0.5})
            sink.write(step, {"eval/accuracy": step / 10})
        sink.close()
    found = [(one.step, "reward/mean" in one.metrics) for one in read_metrics(path)]
    assert found == [(1, True), (1, False), (2, True)]


def test_a_torn_last_line_is_dropped_and_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "m.jsonl"
    _write(path, [1, 2])
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[0][:-5])
    assert _steps(path) == [1, 2]
    _write(path, [3], resume_step=3)
    path.write_text(path.read_text().rstrip("\n"))  # whole, but for its line end
    _write(path, [4], resume_step=4)
    assert _steps(path) == [1, 2, 3, 4]


def test_non_finite_values_are_valid_json_and_come_back(tmp_path):
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    sink.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse)
    assert line["metrics"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity"}
    metrics = read_metrics(tmp_path / "m.jsonl")[0].metrics
    assert math.isnan(metrics["a"]) and metrics["b"] == math.inf and metrics["c"] == -math.inf


def test_a_missing_file_and_an_empty_one_are_said_to_be_so(tmp_path):
    with pytest.raises(ConfigError, match="m.jsonl does not exist"):
        read_metrics(tmp_path / "m.jsonl")
    (tmp_path / "m.jsonl").write_text("")
    with pytest.raises(ConfigError, match="m.jsonl holds no metrics"):
        read_metrics(tmp_path / "m.jsonl")


def test_a_malformed_line_is_named_and_stops_a_resume_before_anything_is_lost(tmp_path):
    path = tmp_path / "m.jsonl"
    _write(path, [1, 2])
    text = path.read_text().replace("\n", "\noops\n", 1)
    path.write_text(text)
    for read in (read_metrics, lambda path: JsonlSink(path, resume_step=1)):
        with pytest.raises(ConfigError, match="m.jsonl, line 2, is not a metrics record"):
            read(path)
    assert path.read_text() == text


def test_tensorboard_forgets_the_steps_that_are_done_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for second, (resume, value) in enumerate(((0, 0.25), (2, 0.5))):
        sink = TensorBoardSink(tmp_path, resume_step=resume)
        for step in (2,) if resume else (1, 2, 3):
            sink.write(step, {"x": value})
        sink.close()
        (written,) = tmp_path.glob("events.out.tfevents.1*")
        written.rename(tmp_path / f"events.out.tfevents.000000000{second}.host.1")
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("x")
    assert [(event.step, event.value) for event in events] == [(1, 0.25), (2, 0.5)]


def test_on_a_full_disk_a_line_is_whole_or_not_there(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        sinks = [JsonlSink(disk / "m.jsonl"), TensorBoardSink(disk)]
        for sink in sinks:
            sink.write(1, {"x": 1.0})
        fill(disk)
        for sink in sinks:
            with pytest.raises(OSError, match="No space left on device"):
                for step in range(2, 1000):
                    sink.write(step, {f"name/{step}-{n}": 0.5 for n in range(9)})
        assert (disk / "m.jsonl").read_bytes().endswith(b"}}\n")
        last = read_metrics(disk / "m.jsonl")[-1].step
        (disk / "filler").unlink()
        for sink in sinks:
            sink.write(last + 1, {"x": 2.0})
            sink.close()
        assert [r.step for r in read_metrics(disk / "m.jsonl")] == list(range(1, last + 2))


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """A stand-in for the package; returns what was called."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "fakes")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("FAKE_WANDB", str(tmp_path / "calls"))
    yield lambda: [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    sys.modules.pop("wandb", None)


def test_wandb_has_one_run_for_a_folder_and_another_where_it_begins_anew(tmp_path, wandb):
    for resume_step in (0, 3, 0):
        with ExitStack() as stack:
            stack.push(WandbSink("rl", tmp_path, {"a": {"b": 1}}, resume_step=resume_step))
    begun, resumed, anew = (call for call in wandb() if call["call"] == "init")
    assert [call for call in wandb() if call["call"] == "finish"] == [
        {"call": "finish", "exit_code": 0}
    ] * 3
    assert (begun["project"], begun["name"]) == ("rl", tmp_path.name)
    assert (begun["config"], begun["dir"]) == ({"a": {"b": 1}}, str(tmp_path))
    assert begun["resume"] == "allow" and begun["allow_val_change"]
    assert resumed["id"] == begun["id"] != anew["id"]
    assert (tmp_path / "wandb_id").read_text().strip() == anew["id"]


def test_wandb_gets_metrics_and_tables_and_hears_of_a_failure(tmp_path, wandb):
    with pytest.raises(RuntimeError), ExitStack() as stack:
        sink = WandbSink("rl", tmp_path, {})
        stack.push(sink)
        sink.write(1, {"reward/mean": 0.5})
        sink.show(1, [example(response="\x00", advantage=0.25)])
        raise RuntimeError
    _, log, table, end = wandb()
    assert (log["step"], log["data"]) == (1, {"reward/mean": 0.5})
    (row,) = table["data"]["samples/train"]
    assert (row["response"], row["advantage"]) == ("?", 0.25)
    assert end == {"call": "finish", "exit_code": 1}


def test_what_wandb_refuses_is_a_sentence_with_the_fix(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("FAKE_WANDB_REFUSES", "1")
    with pytest.raises(
        ConfigError, match=r"\(No API key configured\); run `wandb login`, set WAND"
    ):
        WandbSink("rl", tmp_path, {})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="^observe.wandb_project .*`pip install wandb`, or leave"):
        WandbSink("rl", tmp_path, {})
