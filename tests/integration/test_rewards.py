"""``qurl train`` with a reward from a file beside its recipe, which fails for some responses."""

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.runs import QURL, Run, make_recipe

REWARD = """
def score(prompt, response, answer, metadata):
    letters = sum(map(ord, response))
    if letters % 3 == 0:
        raise ValueError("a third of them")
    return 1.0 if letters % 3 == 1 else 0.5
"""


OPTIONS = ("rollout.engines=1", "train.eval_prompts=8", "reward.failed=-0.25")
OPTIONS += ("reward.kind=", "reward.mix.own.function=own.py:score", "reward.mix.own.weight=1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("rewards")
    (root / "own.py").write_text(REWARD)
    return make_recipe(root)


@pytest.fixture(scope="module")
def trained(tiny) -> Run:
    """One step, with an evaluation before and after it."""
    run = Run(tiny, "own", *OPTIONS, "train.steps=1")
    with run.process():
        assert run.ended() == 0, run.stderr()
    assert run.left() == []
    return run


def test_a_name_that_is_wrong_ends_the_command_before_a_model_is_made(tiny):
    command = [*QURL, "train", str(tiny), "reward.kind=", "reward.function=own.py:scor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tiny.parent)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        f"qurl: reward.function={tiny.parent}/own.py:scor: {tiny.parent}/own.py has no scor; did "
        "you mean score?\n"
    )


def test_a_run_trains_on_what_has_a_score_and_counts_the_rest(trained):
    lines = (trained.dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    (step,) = (one["metrics"] for one in records if "reward/mean" in one["metrics"])
    rewards = [sample["reward"] for sample in trained.samples(1)]
    failed = rewards.count(-0.25)
    assert 0 < failed < 64 and set(rewards) <= {-0.25, 0.5, 1.0}
    assert step["reward/exceptions"] == failed and step["reward/failed_fraction"] == failed / 64
    assert step["reward/mean"] == pytest.approx(sum(rewards) / 64)
    assert all(map(math.isfinite, step.values()))
    assert step["reward/mix/own"] == step["reward/mean"]
    assert step["optimizer/grad_norm"] > 0
    assert (
        trained.stdout().count("*** reward") == 1
    )  # evaluations fail as well, and say nothing new
    assert (
        "raised (reward.mix.own: ValueError: a third of them (own.py, line 5))" in trained.stdout()
    )


def test_a_model_that_is_made_on_the_spot_is_told_from_one_that_was_meant(trained, tiny):
    first, _, _ = trained.stdout().partition("\n")
    assert first == (
        f"model.path={tiny.parent}/model does not exist, and warmstart.steps=10 asks for a small "
        "model of random weights to be made there and fitted to the answers of chain_sum; if you "
        "meant a model of your own, stop this and correct model.path"
    )


def test_a_mean_of_scores_is_not_called_an_accuracy(trained):
    """Nor is it a percentage; and the rewards of a mix are told apart, as in training."""
    text = (trained.dir / "metrics.jsonl").read_text()
    records = [json.loads(line)["metrics"] for line in text.splitlines()]
    evaluated = [one for one in records if "eval/reward" in one]
    assert len(evaluated) == 2 and "eval/accuracy" not in text
    assert all(one["eval/reward"] == one["eval/mix/own"] for one in evaluated)
    before, after = (one["eval/reward"] for one in evaluated)
    said = f"held-out reward {before:.3f} before, {after:.3f} after\n"
    assert said in trained.stdout() and "accuracy" not in trained.stdout().partition("step 1/1")[2]
    page = (trained.dir / "report.html").read_text()
    assert "Held-out reward" in page and "Held-out accuracy" not in page


def test_a_run_stops_where_it_is_told_to_and_saves_what_it_has(tiny, trained):
    shutil.copytree(trained.dir, tiny.parent / "stops")
    run = Run(tiny, "stops", *OPTIONS, "train.steps=2", "reward.on_failure=stop")
    with run.process():
        assert run.ended() == 2, run.stderr()
    assert run.left() == []
    assert "of 64 responses could not be scored: " in run.stderr()
    assert "mend the reward, or set reward.on_failure=score" in run.stderr()
    assert run.stderr().count("\n") == 1 and "Traceback" not in run.stderr()
    assert "step 1 is saved, start again to go on from it" in run.stderr()
