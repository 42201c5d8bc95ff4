"""A number that is not finite is named on every rank alike, in the step that made it."""

import math
from dataclasses import replace

import pytest
import torch

from qurl_megatron.actor.megatron import everywhere, megatron_runtime, together
from qurl_megatron.data.responses import Responses
from qurl_megatron.observe.metrics import Timer
from tests.support.models import random_samples, tiny_checkpoint
from tests.support.policies import build, recipe, whole
from tests.support.ranks import run_on_ranks


def norm_of(models) -> float:
    from qurl_megatron.training.guard import examine

    return math.sqrt(sum(together(lambda: examine(models))))


def same_words(error) -> str:
    words = everywhere(str(error))
    assert len(set(words)) == 1, words
    return words[0]


def break_one_weight(device, config):
    from qurl_megatron.training.guard import NotFinite

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks)
        tensors = whole(policy)
        tied = policy.arch.tied
        expected = torch.stack(
            [v.double().norm() for n, v in tensors.items() if not tied or n != "lm_head.weight"]
        ).norm()
        norm = norm_of([policy])
        assert norm == pytest.approx(expected.item(), rel=1e-5)
        for value, what in ((float("nan"), "has NaN"), (float("-inf"), "has infinity"), (1e12, "")):
            if ranks.rank == ranks.world_size - 1:
                name, master, _ = list(policy.masters())[2]
                kept = master.clone()
                master.view(-1)[-1] = value
            with pytest.raises(NotFinite) as error:
                norm_of([policy])
            said = same_words(error.value)
            assert what in said and f"on rank {ranks.world_size - 1} has " in said
            if ranks.rank == ranks.world_size - 1:
                assert name in said
                master.copy_(kept)
        assert norm_of([policy]) == norm


@pytest.mark.parametrize(
    "layout, dtype",
    [(dict(tensor=2, data=2), "bfloat16"), (dict(pipeline=2, data=2), "float32")],
    ids=str,
)
def test_weights_that_are_not_finite_are_named_on_every_rank(layout, dtype, qwen2, tmp_path):
    config = recipe(qwen2, layout, dtype=dtype)
    run_on_ranks(break_one_weight, 4, "gloo", tmp_path, config)


def improve_on_infinite_rewards(device, config):
    from qurl_megatron.training.guard import NotFinite
    from qurl_megatron.training.step import improve

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks)
        samples = random_samples(16)
        samples[3] = replace(samples[3], reward=float("inf"))
        with pytest.raises(NotFinite, match="the gradient is not finite: .* on rank .* has ") as e:
            improve(policy, Responses.of(samples), config, step=1, timer=Timer())
        same_words(e.value)


@pytest.mark.parametrize("layout", [dict(tensor=2, data=2), dict(pipeline=2)], ids=str)
def test_a_gradient_that_is_not_finite_is_named_on_every_rank_and_ends_the_step(layout, tmp_path):
    config = recipe(tiny_checkpoint(tmp_path / "model", "qwen2"), layout, dtype="bfloat16")
    world = config.parallel.world_size
    run_on_ranks(improve_on_infinite_rewards, world, "gloo", tmp_path, config)
