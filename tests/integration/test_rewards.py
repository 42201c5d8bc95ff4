"""``qurl train`` with a reward from a file beside its recipe, which fails for some responses."""

import json
import math
import shutil
import signal
import threading
from pathlib import Path

import pytest

from qurl_megatron.checkpoints.integrity import refuse_damaged
from tests.support.rewards import reward_server
from tests.support.runs import Run, make_recipe

REWARD = """
def score(prompt, response, answer, metadata):
    letters = sum(map(ord, response))
    if letters % 3 == 0:
        raise ValueError("a third of them")
    return 1.0 if letters % 3 == 1 else 0.5
"""


OPTIONS = ("rollout.engines=1", "train.eval_prompts=8", "reward.failed=-0.25")
OPTIONS += ("reward.kind=", "reward.function=own.py:score")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("rewards")
    (root / "own.py").write_text(REWARD)
    return make_recipe(root)


@pytest.fixture(scope="module")
def trained(tiny) -> Run:
    """One step, with an evaluation before and after it."""
    run = Run(tiny, "own", *OPTIONS, "train.steps=1")
    run.finish()
    return run


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
    assert step["optimizer/grad_norm"] > 0
    assert (
        trained.stdout().count("*** reward") == 1
    )  # evaluations fail as well, and say nothing new
    assert "raised (ValueError: a third of them (own.py, line 5))" in trained.stdout()
    share = f"{100 * failed / 64:.1f} %"
    assert f"  unscored {share}  " in trained.stdout()
    assert f"\n{share} of the responses could not be scored and got rew" in trained.stdout()


def test_a_model_that_is_made_on_the_spot_is_told_from_one_that_was_meant(trained, tiny):
    first, _, _ = trained.stdout().partition("\n")
    assert first == (
        f"model.path={tiny.parent}/model does not exist, and warmstart.steps=10 asks for a small "
        "model of random weights to be made there and fitted to the answers of sort_digits; if you "
        "meant a model of your own, stop this and correct model.path"
    )


def test_a_mean_of_scores_is_not_called_an_accuracy(trained):
    """Nor is it a percentage."""
    text = (trained.dir / "metrics.jsonl").read_text()
    records = [json.loads(line)["metrics"] for line in text.splitlines()]
    evaluated = [one for one in records if "eval/reward" in one]
    assert len(evaluated) == 2 and "eval/accuracy" not in text
    before, after = (one["eval/reward"] for one in evaluated)
    said = f"held-out reward {before:.3f} before, {after:.3f} after\n"
    assert said in trained.stdout() and "accuracy" not in trained.stdout().partition("step 1/1")[2]
    page = (trained.dir / "report.html").read_text()
    assert "Held-out reward" in page and "Held-out accuracy" not in page


def test_a_reward_that_fails_on_every_response_ends_the_run(tiny, trained):
    (tiny.parent / "all.py").write_text("def score(**given):\n    return given['unit']\n")
    options = ("rollout.engines=1", "reward.kind=", "reward.function=all.py:score")
    run = Run(tiny, "none", *options, "train.eval_prompts=0", "train.steps=3")
    run.finish(2)
    assert run.stderr() == (
        f"qurl: reward.function={tiny.parent}/all.py:score scored none of 64 responses: 64 raised "
        "(KeyError: 'unit' (all.py, line 2)); fix it, and call it on one response first, as "
        'docs/rewards.md shows under "Try it"; no step was done\n'
    )


def test_a_stop_is_heard_while_a_server_scores_an_evaluation_which_is_made_up_for(tiny, trained):
    asked, heard = threading.Event(), threading.Event()

    def letters(items):
        return 200, json.dumps({"scores": [len(item["response"]) % 2 for item in items]}).encode()

    def silent(items):
        asked.set()
        heard.wait(300)
        return letters(items)

    # The evaluation before the first step, the step itself, and the evaluation after it.
    with reward_server(letters, letters, silent, letters) as server:
        plain = [one for one in OPTIONS if "reward." not in one]
        reward = ("reward.kind=", f"reward.url={server.url}", "reward.timeout_s=300")
        command = (*plain, *reward, "train.steps=1")
        run = Run(tiny, "slow", *command)
        with run.process() as process:
            run.wait(asked.is_set)
            process.send_signal(signal.SIGTERM)
            assert run.ended(60) == 143, run.stderr()
        heard.set()
        assert run.left() == [] and "step 1 of 1 is saved" in run.stdout()
        state = run.dir / "checkpoints/step_000001/state.json"
        assert json.loads(state.read_text())["unevaluated"]
        again = Run(tiny, "slow", *command)
        again.finish()
    lines = map(json.loads, (run.dir / "metrics.jsonl").read_text().splitlines())
    assert [one["step"] for one in lines if "eval/reward" in one["metrics"]] == [0, 1]
    assert not json.loads(state.read_text())["unevaluated"]
    refuse_damaged(state.parent)
    assert "held-out reward" in again.stdout()


def test_a_run_stops_where_it_is_told_to_and_saves_what_it_has(tiny, trained):
    shutil.copytree(trained.dir, tiny.parent / "stops")
    (tiny.parent / "own.py").write_text(f"# edited\n{REWARD}")
    run = Run(tiny, "stops", *OPTIONS, "train.steps=2", "reward.on_failure=stop")
    run.finish(2)
    assert "of 64 responses could not be scored: " in run.stderr()
    assert "fix the reward, or set reward.on_failure=score" in run.stderr()
    assert run.stderr().count("\n") == 1 and "Traceback" not in run.stderr()
    assert "step 1 is saved, start again to go on from it" in run.stderr()
    told = f"the code of reward.function={tiny.parent}/own.py:score has changed since step"
    assert f"\n{told} 1: held-out scores from here on" in run.stdout()
    assert f'"{told} 1' in (run.dir / "timeline.jsonl").read_text()
