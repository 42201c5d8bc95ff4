"""A step's phases, on runs whose seconds are written by hand."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from qurl_megatron.bench import step as bench_step
from qurl_megatron.bench.command import add_step
from qurl_megatron.bench.record import Case
from qurl_megatron.bench.step import read_run
from qurl_megatron.kit.errors import ConfigError


def write_run(folder: Path, seconds: dict, *, ahead=0.0, steps=4) -> None:
    """Steps of the given seconds by phase, ``ahead`` of the rollout's behind the training."""
    folder.mkdir()
    metrics, spans, start = [], [], 10.0
    took = sum(seconds.values()) - ahead
    for step in range(1, steps + 1):
        slow = 100.0 if step <= 2 else 1.0  # of the first steps, which do not count
        found = {f"time/{phase}": value for phase, value in seconds.items()}
        found |= {"time/step": took * slow, "time/rollout": seconds["rollout"] - ahead}
        rest = took + ahead - seconds["rollout"]
        for lane, name, begin, end in (
            ("engines", "rollout", start, start + seconds["rollout"]),
            ("trainer", "train", start + took - rest, start + took),
        ):
            spans.append({"lane": lane, "name": name, "step": step, "start": begin, "end": end})
        start += took
        metrics.append({"step": step, "time": start, "metrics": found})
    for name, rows in (("metrics.jsonl", metrics), ("timeline.jsonl", spans)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(("ahead", "share"), [(0.0, 0.0), (1.0, 0.5)])
def test_a_run_is_its_median_step_without_the_first_two_and_the_rollouts_overlap(
    tmp_path, ahead, share
):
    write_run(tmp_path / "run", {"rollout": 2.0, "train": 3.0}, ahead=ahead)
    found = read_run(tmp_path / "run")
    assert found.seconds == {"step": 5.0 - ahead, "rollout": 2.0 - ahead, "train": 3.0}
    assert found.overlap == pytest.approx(share) and found.engines == pytest.approx(2.0)
    assert found.longer_side == 3.0


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Runs the benchmark with a recipe whose runs take what the test says."""
    started = []

    def call(*words: str, took=lambda given: {"rollout": 2.0, "train": 3.0}, code=0) -> list[Case]:
        def trains(command: list[str], **_) -> SimpleNamespace:  # and leaves what a run leaves
            given = dict(word.split("=", 1) for word in command if "=" in word)
            started.append(given)
            Path(given["model.path"]).mkdir(exist_ok=True)
            write_run(Path(given["train.run_dir"]), took(given), steps=int(given["train.steps"]))
            return SimpleNamespace(returncode=code, stdout="loading\nqurl: out of memory\n")

        outside = SimpleNamespace(run=trains, PIPE=None, STDOUT=None)
        monkeypatch.setattr(bench_step, "subprocess", outside)
        parser = argparse.ArgumentParser()
        add_step(parser)
        overrides = [f"model.path={tmp_path / 'model'}", "train.micro_batch=32"]
        return bench_step.run(
            parser.parse_args([*overrides, "--steps", "4", "--repeats", "1", *words])
        )

    call.started = started
    return call


def test_by_default_three_stalenesses_are_compared(bench):
    cases = bench()
    assert [case.name for case in cases] == [f"rollout.max_staleness={n}" for n in range(3)]
    # A model that is missing is made before anything is measured.
    assert [given["train.steps"] for given in bench.started] == ["1", "4", "4", "4"]


def test_cases_of_other_models_have_theirs_made_first(bench, tmp_path):
    bench("--case", "train.seed=1", "--case", f"model.path={tmp_path / 'other'}")
    made = [(Path(given["model.path"]).name, given["train.steps"]) for given in bench.started]
    assert made == [("model", "1"), ("other", "1"), ("model", "4"), ("other", "4")]
    assert len({given["train.run_dir"] for given in bench.started}) == 4


def test_a_case_is_the_recipe_with_its_overrides_beside_the_longer_side(bench):
    def took(given: dict) -> dict[str, float]:
        return {"rollout": 2.0, "train": 3.0 / int(given["parallel.data"])}

    words = ["parallel.data=1 rollout.max_staleness=0", "parallel.data=2 parallel.tensor=1"]
    one, two = bench("--case", words[0], "--case", words[1], "--case", words[0], took=took)
    assert (one.name, two.name) == tuple(words)
    keys = {"recipe": "quickstart", "steps": 4, "overrides": "", "case": words[1]}
    assert {**two.keys, "overrides": ""} == keys
    assert one.figure("step").repeats == [5.0] and two.figure("step").repeats == [3.5]
    assert one.figure("step").limit == 3.0 and two.figure("step").limit == 2.0
    assert {figure.name for figure in one.figures if figure.better} == {"step", "rollout", "train"}


def test_a_run_that_fails_is_quoted(bench):
    with pytest.raises(ConfigError, match="quickstart.toml .* failed: qurl: out of memory$"):
        bench(code=1)
