"""The example of docs/environments.md runs as it stands there."""

import dataclasses
import re
from pathlib import Path

from qurl_megatron.config import load
from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.rewards.worker import ROLES, STEP_FIELDS
from qurl_megatron.rewards.workers import EnvironmentPool, check_environment
from qurl_megatron.training.groups import conversation_metrics
from tests.support.models import random_samples
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/environments.md").read_text(encoding="utf-8")
[CLASS] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
[TABLE] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
REST = '[model]\npath = "m"\n[data]\ntask = "chain_sum"\n'
SAID = re.findall(r"^\| (prompt|policy|tool) \| (.*) \|$", PAGE, re.MULTILINE)


def test_the_conversation_is_the_one_that_the_class_holds(tmp_path):
    (tmp_path / "calculator.py").write_text(CLASS)
    (tmp_path / "recipe.toml").write_text(REST + TABLE)
    config = load(tmp_path / "recipe.toml").rollout
    assert (config.max_turns, config.turn_timeout_s) == (4, 10.0)
    check_environment(config)
    roles = {"prompt": "user", "policy": "assistant", "tool": "tool"}
    messages = [{"role": roles[who], "content": text} for who, text in SAID]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    with EnvironmentPool(config) as pool:

        def reply(before, response):
            return pool.ask(before, response, "46", {}).result(PATIENCE_S)

        assert reply(messages[:1], messages[1]["content"]) == messages[2]
        assert reply(messages[:3], messages[3]["content"]) is None
        assert reply(messages[:1], "calculate") == {
            "role": "user",
            "content": "There is no sum before that word.",
        }


def test_the_page_names_every_key_argument_role_and_metric():
    keys = {f.name for f in dataclasses.fields(RolloutConfig)}
    own = {key for key in keys if key.startswith(("environment", "turn", "max_turns"))}
    assert len(own) == 5
    for word in (*own, *STEP_FIELDS, *ROLES, *conversation_metrics(random_samples(1))):
        assert re.search(rf"\b{word}\b", PAGE), word
