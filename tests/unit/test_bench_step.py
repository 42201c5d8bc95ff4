"""A step's phases and scaling, on runs whose seconds are written by hand."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from qurl_megatron.bench import step as bench_step
from qurl_megatron.bench.options import BENCHMARKS, add_options
from qurl_megatron.bench.record import Case
from qurl_megatron.bench.repeats import Repeats
from qurl_megatron.bench.step import (
    Sizes,
    StepSetting,
    Usual,
    case_of,
    linear,
    parse,
    read_run,
    smallest,
)
from qurl_megatron.kit.errors import ConfigError

QUICKSTART = Path(__file__).parents[2] / "launch" / "recipes" / "quickstart.toml"
SETTINGS = """
[rollout]
samples_per_prompt = 4
[data]
prompts_per_step = 8
[algo]
mask_truncated = {masked}
"""


def write_run(folder: Path, seconds: dict, *, ahead=0.0, masked="false", steps=4, **more) -> None:
    """Steps of the given seconds by phase, ``ahead`` of the rollout's behind the training."""
    folder.mkdir()
    metrics, spans, start = [], [], 10.0
    took = sum(seconds.values()) - ahead
    for step in range(1, steps + 1):
        slow = 100.0 if step <= 2 else 1.0  # of the first steps, which do not count
        found = {f"time/{phase}": value for phase, value in seconds.items()}
        found |= {"time/step": took * slow, "time/rollout": seconds["rollout"] - ahead, **more}
        found["response/length"] = 3.0
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
    (folder / "config.toml").write_text(SETTINGS.format(masked=masked))


# -- one run -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("ahead", "share"), [(0.0, 0.0), (1.0, 0.5)])
def test_a_run_is_its_median_step_without_the_first_two_and_the_rollouts_overlap(
    tmp_path, ahead, share
):
    write_run(tmp_path / "run", {"rollout": 2.0, "train": 3.0}, ahead=ahead)
    found = read_run(tmp_path / "run")
    assert found.seconds["step"] == 5.0 - ahead and found.seconds["train"] == 3.0
    assert found.overlap == pytest.approx(share) and found.engines == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("metrics", "masked", "accepted"),
    [
        ({}, "false", 32),
        ({"sampling/unfilled": 2.0}, "false", 24),  # two groups of four teach nothing
        ({"correction/rejected_responses": 0.25}, "false", 24),
        ({"response/truncated": 0.5}, "false", 32),  # cut off, but trained on
        ({"response/truncated": 0.5, "sampling/unfilled": 4.0}, "true", 8),
        ({"correction/rejected_responses": 0.5, "sampling/unfilled": 8.0}, "false", 0),
    ],
)
def test_a_sample_is_accepted_where_the_loss_counts_it(tmp_path, metrics, masked, accepted):
    write_run(tmp_path / "run", {"rollout": 2.0, "train": 3.0}, masked=masked, **metrics)
    assert read_run(tmp_path / "run").accepted == accepted


# -- layouts -----------------------------------------------------------------------------------


def test_a_layout_is_its_sizes():
    assert parse("tp2+engines3") == Sizes(tensor=2, engines=3)
    assert [parse(name).name for name in ("tp1", "engines2+dp2")] == ["tp1", "dp2+engines2"]
    layouts = [parse(name) for name in ("dp2", "tp1+engines2", "tp2+pp2")]
    assert smallest(layouts) == parse("dp2")


@pytest.mark.parametrize("name", ["", "tp", "tp0", "cp2", "tp2+tp4", "2"])
def test_what_is_no_layout_is_refused(name):
    with pytest.raises(ConfigError, match="is not a layout; join tp, pp, dp, engines"):
        parse(name)


TOOK = {"step": 10.0, "rollout": 4.0, "reward": 0.25, "score": 1.0, "train": 3.0, "publish": 1.5}


def test_linear_scaling_by_hand():
    """Twice the data ranks halve score and train, and leave the rest."""
    assert linear(TOOK, parse("dp2"), parse("tp1")) == {
        "rollout": 4.0,
        "score": 0.5,
        "train": 1.5,
        "step": 8.0,
    }
    assert linear(TOOK, parse("engines2"), parse("tp1"))["step"] == 8.0


# -- the benchmark -----------------------------------------------------------------------------


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Runs the benchmark with a recipe whose runs take what the test says."""

    monkeypatch.setattr(bench_step.os, "sched_getaffinity", lambda _: {0, 1})
    started = []

    def call(*words: str, took=lambda given: {"rollout": 2.0, "train": 3.0}) -> list[Case]:
        def trains(command: list[str], **_) -> SimpleNamespace:  # and leaves what a run leaves
            given = dict(word.split("=", 1) for word in command if "=" in word)
            started.append(given)
            Path(given["model.path"]).mkdir(exist_ok=True)
            write_run(Path(given["train.run_dir"]), took(given), steps=int(given["train.steps"]))
            return SimpleNamespace(returncode=0, stdout="")

        outside = SimpleNamespace(run=trains, PIPE=None, STDOUT=None)
        monkeypatch.setattr(bench_step, "subprocess", outside)
        parser = argparse.ArgumentParser()
        add_options(parser, BENCHMARKS["step"])
        overrides = [f"model.path={tmp_path / 'model'}", "train.micro_batch=32"]
        given = [*overrides, "--steps", "4", "--repeats", "1", *words]
        return bench_step.run(parser.parse_args(given))

    call.started = started
    return call


def test_a_staleness_named_twice_is_measured_once_and_a_case_tells_all_that_was_set(bench):
    (case,) = bench("--staleness", "0", "0", "--threads", "1")
    assert case.name == "quickstart, staleness 0"
    assert {**case.keys, "overrides": ""} == {
        "recipe": "quickstart",
        "staleness": 0,
        "steps": 4,
        "threads": 1,
        "overrides": "",
    }
    assert case.figure("step").limit == 3.0 and case.figure("step").share == 0.6
    # 512 responses are not those of the fake run's settings: 32 in 5 s on two cores.
    assert case.figure("per accepted sample").median == pytest.approx(2 * 5 / 32)


def test_what_follows_from_other_figures_is_shown_and_not_compared_with_an_older_record():
    runs = [Usual(seconds=TOOK, engines=4.0, overlap=share, accepted=5.0) for share in (0.5, 0.625)]
    setting = StepSetting(
        name="q", keys={}, recipe=QUICKSTART, overrides=(), model=Path(), devices=2, on_gpus=True
    )
    case = case_of(setting, Repeats(results=runs, yardsticks=[1.0] * 2), {}, "")
    overlap = case.figure("overlap")
    assert (overlap.repeats, overlap.unit) == ([50.0, 62.5], "%")
    assert {figure.name for figure in case.figures if figure.better} == {*TOOK}


def test_a_model_that_is_missing_is_made_before_anything_is_measured(bench):
    bench("--staleness", "0")
    assert [given["train.steps"] for given in bench.started] == ["1", "4"]


def test_on_gpus_a_sample_costs_their_seconds(bench, monkeypatch):
    gpus = [{"name": "NVIDIA L4", "memory_gib": 24}]
    monkeypatch.setattr("qurl_megatron.bench.environment.gpus", lambda: gpus)
    (case,) = bench("--staleness", "0")
    # Two tensor ranks and two engines.
    cost = case.figure("per accepted sample")
    assert cost.unit == "GPU s" and cost.median == pytest.approx(4 * 5 / 32)


def phases_of(given: dict) -> dict[str, float]:
    """Perfect scaling, but for training over tensor ranks, which gains nothing."""
    tensor, data = int(given.get("parallel.tensor", 2)), int(given.get("parallel.data", 1))
    rollout = 2.0 / int(given.get("rollout.engines", 2))
    return {"rollout": rollout, "score": 1.0 / (tensor * data), "train": 3.0 / data, "publish": 0.5}


def scaling(bench) -> dict[str, Case]:
    layouts = ("tp1", "tp2", "dp2", "engines2")
    cases = bench("--staleness", "0", "--layouts", *layouts, took=phases_of)[1:]
    return {case.name.removeprefix("quickstart, "): case for case in cases}


def test_on_gpus_a_layout_stands_beside_linear_scaling(bench, monkeypatch):
    gpus = [{"name": "NVIDIA L4", "memory_gib": 24}]
    monkeypatch.setattr("qurl_megatron.bench.environment.gpus", lambda: gpus)
    cases = scaling(bench)
    assert list(cases) == ["tp1, strong", "tp2, strong", "dp2, strong", "engines2, strong"]
    assert cases["tp1, strong"].figure("step").limit is None
    for name in ("dp2, strong", "engines2, strong"):
        assert cases[name].figure("step").share == pytest.approx(1.0), name
    assert cases["tp2, strong"].figure("train").share == pytest.approx(0.5)
    assert cases["tp2, strong"].figure("score").share == pytest.approx(1.0)
    # Linear: 2 + 0.5 + 1.5 + 0.5 of 6 s.
    assert cases["tp2, strong"].figure("step").share == pytest.approx(4.5 / 6)


def test_on_a_cpu_layouts_have_no_limit(bench):
    assert all(case.figure("step").limit is None for case in scaling(bench).values())


def test_a_layout_that_the_recipe_cannot_have_is_refused_before_anything_runs(bench):
    with pytest.raises(ConfigError, match="must be a multiple of"):
        bench("--layouts", "tp1", "dp3")
    assert not bench.started
