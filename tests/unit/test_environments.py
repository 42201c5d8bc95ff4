"""Environments of the user's own: found or refused in one sentence, asked, and never believed; and
the example of docs/environments.md, which runs as it stands there."""

import dataclasses
import re
from dataclasses import replace
from pathlib import Path

import pytest

from qurl_megatron.config import RewardConfig, load
from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.kit.errors import ConfigError, Unscored
from qurl_megatron.rewards import RewardPool
from qurl_megatron.rewards.pool import Tally, items_of
from qurl_megatron.rewards.worker import ROLES, STEP_FIELDS
from qurl_megatron.rewards.workers import EnvironmentPool, check_environment
from qurl_megatron.training.groups import conversation_metrics
from tests.support.environments import write_classes
from tests.support.models import random_samples
from tests.support.waiting import PATIENCE_S

PAGE = (Path(__file__).parents[2] / "docs/environments.md").read_text(encoding="utf-8")
[CLASS] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
[TABLE] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
REST = '[model]\npath = "m"\n[data]\ntask = "chain_sum"\n'
SAID = re.findall(r"^\| (prompt|policy|tool) \| (.*) \|$", PAGE, re.MULTILINE)


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
        ("raise", "exceptions", r"ValueError: no unit in this response \(environment.py, line"),
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


def test_the_conversation_is_the_one_that_the_class_holds(tmp_path):
    (tmp_path / "calculator.py").write_text(CLASS)
    (tmp_path / "recipe.toml").write_text(REST + TABLE)
    config = load(tmp_path / "recipe.toml").rollout
    assert (config.max_turns, config.turn_timeout_s) == (4, 10.0)
    check_environment(config)
    roles = {"prompt": "user", "policy": "assistant", "tool": "tool"}
    messages = [{"role": roles[who], "content": text} for who, text in SAID]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    none = {"role": "user", "content": "There is no sum before that word."}
    with EnvironmentPool(config) as pool:
        for before, response, expected in (
            (messages[:1], messages[1]["content"], messages[2]),
            (messages[:3], messages[3]["content"], None),
            (messages[:1], "calculate", none),
        ):
            assert reply(pool, response, messages=before, answer="46") == expected


def test_the_page_names_every_key_argument_role_and_metric():
    keys = {f.name for f in dataclasses.fields(RolloutConfig)}
    own = {key for key in keys if key.startswith(("environment", "turn", "max_turns"))}
    assert len(own) == 5
    for word in (*own, *STEP_FIELDS, *ROLES, *conversation_metrics(random_samples(1))):
        assert re.search(rf"\b{word}\b", PAGE), word
