"""What a run writes on its way, and what becomes of it where the disk refuses."""

import errno
import os
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from qurl_megatron.config import load
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.samples import HELD_OUT, TRAIN, read_samples
from qurl_megatron.observe.sinks import read_metrics
from qurl_megatron.observe.timeline import Timeline
from qurl_megatron.rewards.pool import Tally
from qurl_megatron.training.journal import Journal
from qurl_megatron.training.state import TrainState, claim
from qurl_megatron.types import Prompt, Sample
from tests.support.descriptions import RECIPE_TEXT

FRESH = TrainState()
STEP = {"optimizer/weight_norm": 8.0, "reward/mean": 0.5, "time/step": 1.0}


SCORED = dict.fromkeys(range(2), np.array([-0.5]))


@pytest.fixture
def config(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE_TEXT)
    sizes = ["train.eval_prompts=4", "observe.show=1", "train.steps=60"]
    return load(tmp_path / "recipe.toml", [f"train.run_dir={tmp_path / 'run'}", *sizes])


@pytest.fixture
def run_dir(config, tmp_path):
    return tmp_path / "run"


@contextmanager
def opened(config, run_dir, state=FRESH, remarks=()):
    with claim(run_dir, config) as claimed, Journal(claimed, state, 8.0, remarks) as journal:
        yield journal


def answers(*rewards: float) -> list[Sample]:
    return [
        Sample(Prompt(i, (1,), f"q{i}", "a"), (2,), (-1.0,), "stop", ((0, 1),), reward=reward)
        for i, reward in enumerate(rewards)
    ]


def test_a_run_leaves_metrics_examples_and_events_and_goes_on_where_it_was(config, run_dir, capsys):
    with opened(config, run_dir, remarks=["settings changed: x"]) as journal:
        assert journal.evaluated(FRESH, answers(1.0, 0.0, 0.0, 0.0), Tally(4)) == 0.25
        journal.record_events(
            1, [{"engine": "e0", "event": "died", "message": "by 9\nx", "time": 5.0}]
        )
        with journal.timer(1).phase("train"):
            pass
        journal.step(1, STEP)
        journal.keep_examples(1, dict(enumerate(answers(1.0))), {0: 0.5})
        journal.step(2, {**STEP, "optimizer/weight_norm": 1e9})
        later = replace(FRESH.scored(0.25), step=2)
        journal.evaluated(later, answers(1.0, 0.0, 1.0, 1.0), Tally(4))
    said = capsys.readouterr().out
    assert "settings changed: x\n" in said and "*** fleet, step 1: e0 died by 9\n" in said
    assert "*** weights, step 2: " in said and "optimizer.lr=1e-06 is far too large" in said
    assert "step 0: held-out accuracy 25.0%\n" in said
    assert "step 2: held-out accuracy 75.0% (+50.0 points since step 0)\n" in said
    records = [(one.step, one.metrics) for one in read_metrics(run_dir / "metrics.jsonl")]
    assert [step for step, _ in records] == [0, 1, 2, 2] and records[1][1] == STEP
    assert records[-1][1] == {"eval/accuracy": 0.75}
    events = [(one.lane, one.step) for one in Timeline.read(run_dir / "timeline.jsonl")]
    assert events == [("run", 0), ("fleet", 1), ("trainer", 1), ("weights", 2)]
    kept = {(one.step, one.of, one.advantage) for one in read_samples(run_dir)}
    assert {(0, HELD_OUT, None), (1, TRAIN, 0.5), (2, HELD_OUT, None)} == kept
    # What is not in the checkpoint is done again; the evaluation of its step too, if it is owed.
    state = TrainState(step=2, unevaluated=True)
    with opened(config, run_dir, state) as journal:
        journal.evaluated(state, answers(1.0), Tally(1))
    with opened(config, run_dir, replace(state, step=1, unevaluated=False)) as journal:
        journal.step(2, STEP)
    records = [(one.step, one.metrics) for one in read_metrics(run_dir / "metrics.jsonl")]
    assert [step for step, _ in records] == [0, 1, 2] and records[-1][1] == STEP
    assert "held-out accuracy 100.0%\n" in capsys.readouterr().out
    with opened(config, run_dir, TrainState(step=4)):
        pass
    said = f"{run_dir}/metrics.jsonl ends with step 2, and the checkpoint is of step 4"
    assert said in capsys.readouterr().out


def test_weights_that_double_are_told_once_for_each_doubling(config, run_dir, capsys):
    with opened(config, run_dir) as journal:  # with a norm of 8
        for step, norm in enumerate((8.1, 15.0, 17.0, 18.0, 33.0, 1e9, 1e9), 1):
            journal.step(step, {**STEP, "optimizer/weight_norm": norm})
    events = Timeline.read(run_dir / "timeline.jsonl")
    assert [event.step for event in events if event.lane == "weights"] == [3, 6]
    assert "has grown from 8 to 17; optimizer.lr=1e-06" in capsys.readouterr().out


class FullDisk:
    """A sink whose disk is full; counts what it was given."""

    def __init__(self):
        self.asked = 0

    def write(self, step, metrics):
        self.asked += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_the_disk_refuses_ends_nothing_at_once_and_is_said_with_what_is_saved(
    config, run_dir, capsys
):
    with opened(config, run_dir) as journal:
        journal.step(1, STEP)
        assert journal.refused is None
        full = FullDisk()
        journal.sinks.insert(0, full)
        for step in (2, 3):  # the rank is in the middle of what all do
            journal.step(step, STEP)
        assert full.asked == 1 and "No space left on device" in str(journal.refused)
        assert "train.run_dir" in str(journal.refused)
        journal.keep_rollout(3, answers(1.0), SCORED)
        with pytest.raises(ConfigError, match="No space left.*; step 3 is saved all the same"):
            journal.finish(TrainState(step=3))
    assert [one.step for one in read_metrics(run_dir / "metrics.jsonl")] == [1]
    assert not (run_dir / "rollouts").exists() and (run_dir / "report.html").is_file()


def test_a_rollout_is_kept_whole_token_by_token(config, run_dir):
    with opened(config, run_dir) as journal:
        journal.keep_rollout(7, answers(1.0, 0.0), SCORED)
    lines = (run_dir / "rollouts/step_000007.jsonl").read_text().splitlines()
    assert (
        len(lines) == 2
        and '"reward": 1.0' in lines[0]
        and '"proximal_log_probs": [-0.5]' in lines[0]
    )
