import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from qurl_megatron.bench import step as bench_step
from qurl_megatron.bench.options import BENCHMARKS, add_shared
from qurl_megatron.bench.repeats import Repeats
from qurl_megatron.bench.step import case_of, read_run


def write_run(folder, *, ahead: float) -> None:
    """Four steps of 3 s of training and 2 s of rollout, ``ahead`` of them behind the training."""
    folder.mkdir()
    metrics, spans = [], []
    for step in range(1, 5):
        start = 10.0 * step
        slow = 100.0 if step <= 2 else 1.0  # of the first steps, which do not count
        found = {"time/step": (5.0 - ahead) * slow, "time/rollout": 2.0 - ahead, "time/train": 3.0}
        metrics.append({"step": step, "time": start, "metrics": found})
        for lane, name, begin, end in (
            ("engines", "rollout", start, start + 2.0),
            ("trainer", "train", start + 2.0 - ahead, start + 5.0 - ahead),
        ):
            spans.append({"lane": lane, "name": name, "step": step, "start": begin, "end": end})
    for name, rows in (("metrics.jsonl", metrics), ("timeline.jsonl", spans)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(("ahead", "share"), [(0.0, 0.0), (1.0, 0.5)])
def test_a_run_is_its_median_step_without_the_first_and_the_rollouts_overlap(
    tmp_path, ahead, share
):
    write_run(tmp_path / "run", ahead=ahead)
    found = read_run(tmp_path / "run")
    assert found["step"] == 5.0 - ahead and found["train"] == 3.0
    assert found["overlap"] == pytest.approx(share) and found["engines"] == pytest.approx(2.0)


def test_the_limit_of_a_step_is_the_longer_side(tmp_path):
    write_run(tmp_path / "run", ahead=1.0)
    runs = Repeats(seconds=[9.0], results=[read_run(tmp_path / "run")], yardsticks=[0.01])
    keys = {"recipe": "quickstart", "staleness": 1}
    case = case_of(keys, runs)
    assert (case.name, case.keys) == ("quickstart, staleness 1", keys)
    assert case.figure("step").limit == 3.0 and case.figure("step").share == 0.75
    assert case.notes["overlap"] == 0.5


def test_a_staleness_named_twice_is_measured_once_and_a_case_tells_all_that_was_set(monkeypatch):
    def trains(command: list[str], **_) -> SimpleNamespace:  # and leaves what a run leaves
        (run_dir,) = (word for word in command if word.startswith("train.run_dir="))
        write_run(Path(run_dir.partition("=")[2]), ahead=0.0)
        return SimpleNamespace(returncode=0, stdout="")

    monkeypatch.setattr(
        bench_step, "subprocess", SimpleNamespace(run=trains, PIPE=None, STDOUT=None)
    )
    parser = argparse.ArgumentParser()
    add_shared(parser, BENCHMARKS["step"])
    BENCHMARKS["step"].add_options(parser)
    words = ["--staleness", "0", "0", "--steps", "4", "--repeats", "1"]
    (case,) = bench_step.run(parser.parse_args(["data.seed=3", "quant.scheme=fp8", *words]))
    overrides = "data.seed=3 quant.scheme=fp8"
    given = {"recipe": "quickstart", "staleness": 0, "steps": 4, "overrides": overrides}
    assert case.keys == given
