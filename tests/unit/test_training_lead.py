"""A step's responses from a scripted engine: order, grades, cursors, failures, stops."""

import json
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from qurl_megatron.config import RewardConfig, load
from qurl_megatron.data.prompts import PromptStream
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.kit.errors import ConfigError, Interrupted
from qurl_megatron.observe.metrics import Timer, values
from qurl_megatron.rewards import RewardPool
from qurl_megatron.training.lead import Lead
from qurl_megatron.training.state import TrainState
from tests.support.descriptions import RECIPE_TEXT
from tests.support.fake_engine import FakeEngine, token_at

NEW = 3  # tokens of each response
FRESH = TrainState()


class Numbers:
    """A token per character in; the ids themselves out, so that the last id is the last number."""

    def read(self, questions, *, chat):
        return (tuple(map(ord, question.text)) for question in questions)

    def texts_of(self, sample):
        text = " ".join(map(str, sample.response_ids))
        return text, text


class Journal:
    """Where a source says what a person should know: scripted to be full, and listened to."""

    def __init__(self):
        self.refused = None
        self.alarms: list[str] = []
        self.phases: list[str] = []
        self.progress = SimpleNamespace(phase=self.phases.append)
        self.timeline = SimpleNamespace(add=lambda span: None)

    def alarm(self, lane, text, step):
        self.alarms.append(f"{lane} {step}: {text}")


class Made(SimpleNamespace):
    def publish(self, version: int) -> None:
        self.engine.version = self.fleet.names.of(version)
        with self.fleet.publication() as engines:
            self.fleet.confirm(engines, version)
        self.source.published(version)

    def take(self, step: int):
        return self.source.take(step, Timer())


@pytest.fixture
def make(tmp_path):
    """A source over the questions a, bb, ..., of which every second one will be answered right."""
    with ExitStack() as stack:

        def make(state: TrainState = FRESH, *overrides: str) -> Made:
            rows = [
                {"prompt": chr(97 + i) * (i + 1), "answer": token_at(i + NEW) if i % 2 else "none"}
                for i in range(20)
            ]
            data = tmp_path / "prompts.jsonl"
            data.write_text("\n".join(map(json.dumps, rows)))
            (tmp_path / "recipe.toml").write_text(RECIPE_TEXT)
            engine = stack.enter_context(FakeEngine())
            settings = [
                *(f"data.path={data}", f"data.eval_path={data}", "data.task=", "data.task_args={}"),
                *("data.prompts_per_step=4", "rollout.samples_per_prompt=2", "train.micro_batch=4"),
                *(f"rollout.max_new_tokens={NEW}", "train.eval_prompts=6", "train.steps=9"),
                *("rollout.backend=sglang", f'rollout.urls=["{engine.url}"]'),
            ]
            config = load(tmp_path / "recipe.toml", [*settings, *overrides])
            prompts = PromptStream(config.data, Numbers(), seed=0, held_out=6)
            if state.cursor:
                prompts.load_state_dict(state.cursor)
            fleet = stack.enter_context(
                Fleet(config.rollout, "unused", scheme="none", log_dir="unused", vocabulary=128)
            )
            rewards = stack.enter_context(RewardPool(RewardConfig(kind="last_number")))
            journal, stop = Journal(), SimpleNamespace(asked=False)
            source = Lead(config, state, prompts, fleet, rewards, journal, stop=lambda: stop.asked)
            stack.enter_context(source)
            return Made(source=source, engine=engine, fleet=fleet, journal=journal, stop=stop)

        yield make


def asked(made: Made) -> list[list[int]]:
    """The prompts that the engine was asked since the last look, once per response."""
    rows = [ids for body in made.engine.bodies("/generate") for ids in body["input_ids"]]
    made.engine.calls.clear()
    return sorted(rows)


def test_a_step_is_asked_graded_and_measured_and_a_restart_from_its_cursor_asks_on(make):
    made = make()
    made.publish(0)
    responses, rollout = made.take(1)
    first = asked(made)
    assert len(first) == 8 and first[::2] == first[1::2]
    kept = made.source.kept
    assert {i: float(len(s.prompt.text) % 2 == 0) for i, s in kept.items()} == {
        i: s.reward for i, s in kept.items()
    }
    rewards = responses.summary.rewards_R.tolist()
    measured = values(rollout.metrics)
    assert measured["reward/mean"] == sum(rewards) / 8 and 0 < measured["reward/mean"] < 1
    assert (measured["sync/version"], measured["sync/staleness"]) == (0, 0)
    assert measured["response/length"] == NEW
    assert rollout.tokens == 8 * NEW and rollout.seconds > 0
    made.publish(1)
    second, _ = made.take(2)
    again = make(TrainState(step=1, cursor=rollout.cursor))
    again.publish(1)
    resumed, _ = again.take(2)
    next_ones = asked(made)
    assert asked(again) == next_ones and not any(ids in first for ids in next_ones)
    assert resumed.tokens.tolist() == second.tokens.tolist()


def test_what_no_engine_could_answer_is_asked_again_once_one_has_the_weights(make):
    made = make()
    made.publish(0)
    made.engine.faults = ["500"] * 64
    with pytest.raises(EngineError):
        made.take(1)
    made.engine.faults = []
    in_vain = {tuple(ids) for ids in asked(made)}  # not all, where the first answers came early
    made.source.recover()
    made.publish(0)
    made.source.retry()
    made.take(1)
    in_all = {tuple(ids) for ids in asked(made)}
    assert in_vain <= in_all and len(in_all) == 4


def test_a_stop_ends_a_rollout_an_evaluation_and_the_wait_for_an_engine(make):
    made = make()
    made.publish(0)
    made.engine.paused.set()  # it answers nothing before the stop is looked at
    made.stop.asked = True
    with pytest.raises(Interrupted, match="stopped before the rollout of step 1"):
        made.take(1)
    assert not made.engine.bodies("/generate")
    with pytest.raises(Interrupted):
        made.source.answer_held_out()
    asks = iter([False] + [True] * 99)
    made.source._stop = lambda: next(asks)
    with pytest.raises(Interrupted, match="stopped while engines were generating"):
        made.take(1)
    made.engine.close()
    made.fleet.fail(made.fleet.serving()[0], "gone")
    with pytest.raises(Interrupted, match="stopped while an engine was waited for"):
        made.source.recover()


def test_a_journal_that_is_full_ends_the_run_before_the_next_rollout(make):
    made = make()
    made.publish(0)
    made.journal.refused = ConfigError("the disk is full")
    with pytest.raises(ConfigError, match="the disk is full"):
        made.take(1)
    assert not made.engine.bodies("/generate")


@pytest.mark.parametrize("each", [1, 3])
def test_an_evaluation_asks_the_held_out_prompts_and_grades_them(make, each):
    made = make(FRESH, f"train.eval_samples={each}")
    made.publish(0)
    samples, tally = made.source.answer_held_out()
    assert [sample.prompt.index for sample in samples] == [i for i in range(6) for _ in range(each)]
    assert all(sample.reward == sample.prompt.index % 2 for sample in samples)
    assert tally.responses == 6 * each and made.journal.phases[-1] == "evaluate"
    temperatures = {
        p["temperature"] for b in made.engine.bodies("/generate") for p in b["sampling_params"]
    }
    assert temperatures == {0.0 if each == 1 else 1.0}


def test_groups_that_teach_nothing_are_said_to_fill_the_batch(make):
    made = make(FRESH, "algo.dynamic_sampling=true", "algo.max_refills=1")
    made.publish(0)
    _, rollout = made.take(1)  # the engine says the same to both of a group
    assert values(rollout.metrics)["sampling/unfilled"] == 4
    [said] = made.journal.alarms
    assert said.startswith("sampling 1: 4 of 4 groups have answers that are all right or all wrong")
