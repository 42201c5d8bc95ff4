"""What engines would refuse as impossible is refused before they start."""

import pytest

from qurl_megatron.config import RolloutConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import read_arch
from qurl_megatron.training.inputs import (
    longest_prompt,
    no_room_for_the_environment,
    refuse_endless_responses,
)
from tests.unit.test_damaged_files import QWEN2

ARCH = read_arch({**QWEN2, "max_position_embeddings": 1024})


def test_a_response_that_fills_the_context_is_refused():
    message = r"rollout.max_new_tokens=100000 leaves no room .* takes 1024 tokens.*below 1024"
    with pytest.raises(ConfigError, match=message):
        refuse_endless_responses(RolloutConfig(max_new_tokens=100_000), ARCH)
    with pytest.raises(ConfigError):
        refuse_endless_responses(RolloutConfig(max_new_tokens=1024), ARCH)
    refuse_endless_responses(RolloutConfig(max_new_tokens=1023), ARCH)
    assert longest_prompt(RolloutConfig(max_new_tokens=1000), ARCH) == 24


@pytest.mark.parametrize(
    "engines",
    [
        dict(urls=("http://a:1",)),
        dict(rendezvous="engines.jsonl"),
        dict(backend="sglang", engine_args=("--context-length=200000",)),
    ],
)
def test_engines_that_may_take_more_are_left_to_say_so(engines):
    rollout = RolloutConfig(max_new_tokens=100_000, **engines)
    refuse_endless_responses(rollout, ARCH)
    assert longest_prompt(rollout, ARCH) is None


def test_where_the_environment_has_no_room_the_limit_that_holds_is_named():
    rollout = RolloutConfig(max_new_tokens=1000)
    short, long = (no_room_for_the_environment(rollout, ARCH, tokens) for tokens in (23, 24))
    assert short.endswith(
        "max_new_tokens=1000, which all turns and its words share; raise it, or "
        "have the environment say less"
    )
    assert "the model takes no more than 1024 tokens with the prompt" in long
    assert "data.max_prompt_tokens" in long
