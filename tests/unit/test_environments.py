"""Environments of the user's own: found or refused in one sentence, asked, and never believed."""

import asyncio
import re
from dataclasses import replace

import pytest

from qurl_megatron.config import RewardConfig
from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.kit.errors import ConfigError, Unscored
from qurl_megatron.rewards import RewardPool
from qurl_megatron.rewards.pool import Tally, items_of
from qurl_megatron.rewards.worker import as_reply, call
from qurl_megatron.rewards.workers import EnvironmentPool, check_environment
from tests.support.environments import write_classes
from tests.support.models import random_samples
from tests.support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return write_classes(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def pool(own):
    config = RolloutConfig(environment=f"{own}:Scripted", turn_timeout_s=3.0)
    with EnvironmentPool(config) as pool:
        yield pool


def reply(pool, response, *, messages=(), answer="7", metadata=None):
    return pool.ask(messages, response, answer, metadata or {}).result(PATIENCE_S)


@pytest.mark.parametrize("name", ["Scripted", "Later"])
def test_it_is_told_of_the_conversation_and_its_answer_is_the_next_message(own, name):
    with EnvironmentPool(RolloutConfig(environment=f"{own}:{name}")) as pool:
        for count in (1, 3):  # one loop for all calls: a lock of another would be refused
            messages = [{"role": "user", "content": "?"}] * count
            said = reply(pool, "hello", messages=messages, metadata={"a": float("nan")})
            assert said == {"role": "tool", "content": f"hello 7 {{'a': None}} {count}"}
        assert reply(pool, "over") is None
        assert reply(pool, "half \ud800")["content"].startswith("half ? 7")  # as a tokenizer takes


@pytest.mark.parametrize(
    "response, cause, why",
    [
        (
            "raise",
            "exceptions",
            r"ValueError: no unit in this response \(environment.py, line",
        ),
        ("exit", "exceptions", "SystemExit: 0"),
        ("memory", "exceptions", "MemoryError"),
        ("die", "crashes", "2 workers one after the other"),
        ("hang", "timeouts", "rollout.turn_timeout_s=3"),
        ("text", "invalid", "a value of type str; return .* or None"),
        ("pair", "invalid", "a value of type tuple"),
        ("system", "invalid", "a message with role 'system'"),
        ("number", "invalid", "a message whose content is of type int"),
        ("blank", "invalid", "a message without text; return"),
    ],
)
def test_what_goes_wrong_is_one_sentence_and_costs_no_other_its_answer(pool, response, cause, why):
    bad, good = (pool.ask((), said, "7", {}) for said in (response, "fine"))
    found = bad.result(PATIENCE_S)
    assert isinstance(found, Unscored) and found.cause == cause
    assert re.match(why, found.why) and "\n" not in found.why
    assert good.result(PATIENCE_S)["content"] == "fine 7 {} 0"


class Leaving(dict):
    def get(self, name, default=None):
        raise SystemExit


def test_a_message_whose_own_code_fails_is_an_exception():
    said = call(Leaving, as_reply, asyncio.Runner(), {})
    assert isinstance(said, Unscored) and said.cause == "exceptions"


@pytest.mark.parametrize(
    "name, message",
    [
        ("Scripte", "has no Scripte; did you mean Scripted?"),
        ("xyz", "has no xyz; it has "),
        ("Needs", r"Needs\(\) failed: TypeError: .* missing 1 required positional argument"),
        ("NoStep", r"NoStep has no method step\(messages=..., response=..., answer=..., metadata="),
        ("Misses", r"cannot be called as Misses\(\).step\(messages=.*; give it these parameters"),
        ("function", r" is a function; name a class \(it has Scripted, "),
        ("score", r" is a function; name a class \(it has Scripted, "),
    ],
)
def test_what_cannot_be_used_is_refused_before_the_run(own, name, message):
    with pytest.raises(ConfigError, match=f"^rollout.environment={own}:{name}.*{message}"):
        check_environment(RolloutConfig(environment=f"{own}:{name}"))


def test_a_response_that_failed_in_it_has_no_score():
    plain = random_samples(3)
    lost = replace(plain[1], failure=Unscored("timeouts", "rollout.turn_timeout_s=3"))
    items = items_of([plain[0], lost, plain[2]], ["", "x", ""])
    failure = Unscored("environment", "took too long: rollout.turn_timeout_s=3")
    with RewardPool(RewardConfig(kind="exact")) as rewards:
        scores = rewards.grade(items)
    assert scores == [1, failure, 1]
    tally = Tally.of(scores)
    assert tally.said() == f"1 failed in the environment ({failure.why})"
    assert tally.said({"environment"}) and not tally.said({"timeouts"})
    strict = RewardConfig(kind="exact", on_failure="stop")
    with RewardPool(strict) as rewards, pytest.raises(ConfigError, match="1 of 3 responses could"):
        rewards.grade(items)
