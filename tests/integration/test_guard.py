"""Runs that collapse, or that draw until their groups teach something; the real command line."""

import re
from pathlib import Path

import pytest

from qurl_megatron.observe.timeline import Timeline
from qurl_megatron.training.state import TrainState, latest
from tests.support.runs import GUARDED, as_if_killed_after, metrics, qurl, rollouts


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("guard")
    path = root / "recipe.toml"
    path.write_text(GUARDED.format(root=root))
    return path


def test_refills_and_a_guard_interrupted_and_resumed_equal_an_uninterrupted_run(recipe):
    whole = recipe.parent / "whole"
    options = ("train.save_rollouts=true", "quant.rounding=stochastic")
    saves = ("checkpoint.every=1", "checkpoint.keep=3")
    done = qurl("train", recipe, *options, *saves, f"train.run_dir={whole}")
    seen = metrics(whole)
    assert list(seen) == [1, 2, 3]
    again = as_if_killed_after(1, whole)  # in the middle of the guard's patience
    done = qurl("train", recipe, *options, f"train.run_dir={again}")
    assert f"resuming {again} after step 1" in done.stdout
    assert metrics(again) == seen
    assert [seen[step]["guard/tripped"] for step in (1, 2, 3)] == [0, 1, 1]
    assert seen[1]["quant/code_flip_rate"] > 0.3  # two draws differ one time in three

    assert max(seen[step]["sampling/refills"] for step in (1, 2, 3)) >= 1
    used: list[int] = []
    for step in (1, 2, 3):
        samples = rollouts(whole, step)
        rewards: dict[int, set[float]] = {}
        for sample in samples:
            rewards.setdefault(sample["prompt"]["index"], set()).add(sample["reward"])
        assert len(rewards) == 8 and len(samples) == 32
        assert list(rewards) == sorted(rewards)
        mixed = sum(len(values) == 2 for values in rewards.values())
        assert mixed == 8 - seen[step]["sampling/unfilled"]
        used += rewards
    assert len(used) == len(set(used))


def test_a_halted_run_saves_itself_and_goes_on_when_it_is_started_again(recipe):
    run_dir = recipe.parent / "halted"
    done = qurl("train", recipe, "guard.action=halt", f"train.run_dir={run_dir}", code=3)
    assert re.fullmatch(
        r"qurl: the guard halted the run: rollout/rho_max = 1\.\d* is above guard\.rho_above = "
        r"0\.5, 2 steps in a row up to step 2; step 2 is saved, start again to go on from it\n",
        done.stderr,
    )
    assert "*** guard, step 2: halted: rollout/rho_max" in done.stdout
    assert list(metrics(run_dir)) == [1, 2]
    state = TrainState.read(latest(run_dir))
    assert state.step == 2
    assert "Halted at step 2.</strong>" in (run_dir / "report.html").read_text()

    qurl("train", recipe, "guard.action=warn", f"train.run_dir={run_dir}")
    assert list(metrics(run_dir)) == [1, 2, 3]
    assert "Halted at step 2, and started again" in (run_dir / "report.html").read_text()
    events = [span for span in Timeline.read(run_dir / "timeline.jsonl") if span.lane == "guard"]
    assert [(event.step, event.name.partition(":")[0]) for event in events] == [(2, "halted")]
