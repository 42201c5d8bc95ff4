"""Loss and gradients do not depend on how the model is split; masters keep what BF16 drops."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from qurl_megatron.actor.megatron import everywhere, megatron_runtime
from qurl_megatron.actor.policy import Reference
from qurl_megatron.config import CriticConfig, TrainConfig
from qurl_megatron.data.responses import Responses
from qurl_megatron.observe.metrics import Timer, merge, values
from tests.support.cases import all_but
from tests.support.models import FAMILIES, random_samples, tiny_checkpoint
from tests.support.policies import (
    ALGO,
    EXPERT_LAYOUTS,
    LAYOUTS,
    PACKED,
    ROUNDING,
    assert_same_training,
    build,
    check_masters,
    first_gradients,
    recipe,
    reference_gradients,
    relative,
    run,
    whole,
)
from tests.support.ranks import run_on_ranks


@pytest.mark.parametrize(
    "layout",
    all_but(LAYOUTS, "TP2 x DP2", "CP2 x DP2", "PP2 x CP2", nccl=["TP2 x PP2", "DP2", "TP2 x CP2"]),
)
def test_gradients_and_updates_equal_one_process(backend, layout, alone, tmp_path):
    folder, expected = alone("qwen2", **ALGO)
    assert_same_training(
        run(tmp_path, backend, recipe(folder, LAYOUTS[layout], **ALGO), "split"), expected
    )


@pytest.mark.parametrize("family", all_but(["qwen3", "llama", "qwen3_moe", "qwen2_moe"], "llama"))
def test_other_families_split_as_well(family, alone, backend, tmp_path):
    folder, expected = alone(family, **ALGO)
    config = recipe(folder, dict(tensor=2, pipeline=2), **ALGO)
    actual = run(tmp_path, backend, config, "split")
    assert_same_training(actual, expected, rounding=ROUNDING.get(family, 1e-5))


@pytest.mark.parametrize(
    "layout, train",
    [
        ("EP2 x DP2", PACKED),
        ("EP2 x TP2", {}),
        pytest.param("EP2 x CP2", PACKED, marks=pytest.mark.thorough),
        ("EP2 x PP2", PACKED),
        ("EP2 x DP4", {}),
        ("EP4 x TP2 x DP2", PACKED),
        ("EP2 x PP2 x CP2", PACKED),
        pytest.param("EP2 x DP2", {}, marks=pytest.mark.thorough),
        pytest.param("EP2 x TP2", PACKED, marks=pytest.mark.thorough),
        pytest.param("EP2 x PP2", {}, marks=pytest.mark.thorough),
        pytest.param("EP2 x DP4", PACKED, marks=pytest.mark.thorough),
    ],
    ids=lambda value: value if isinstance(value, str) else "packed" if value else "padded",
)
def test_experts_on_different_ranks_train_as_in_one_process(
    layout, train, alone, backend, tmp_path
):
    folder, expected = alone("qwen3_moe", **ALGO)
    config = recipe(folder, EXPERT_LAYOUTS[layout], **ALGO)
    if train:
        config = replace(config, train=TrainConfig(**train))
    assert_same_training(run(tmp_path, backend, config, "split"), expected)


def score_early_and_late(device, config) -> None:
    """The first update finds the scores of its own minibatch, if nothing needs them before."""
    from qurl_megatron.actor.critic import Critic
    from qurl_megatron.training.step import improve

    def learn(config, critic=None) -> tuple[list[int], dict, dict]:
        policy = build(config, ranks, reference=Reference())
        with mock.patch.object(policy, "score", wraps=policy.score) as score:
            samples = Responses.of(random_samples(16))
            metrics, _ = improve(policy, samples, config, step=1, timer=Timer(), critic=critic)
        scored = [len(call.args[0]) for call in score.call_args_list]
        return scored, values(merge(everywhere(metrics))), whole(policy)

    with megatron_runtime(config.parallel) as ranks:
        late, metrics, weights = learn(config)
        early, expected, same = learn(
            replace(config, train=replace(config.train, save_rollouts=True))
        )
        assert (late, early) == ([4, 8], [8, 8])  # the second is the reference's
        assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert all(relative(weights[name], value) < 1e-6 for name, value in same.items())
        critic = Critic.build(config.model, config.parallel, config.critic_optimizer, ranks)
        # The critic alone is updated, so no pass of the policy would score.
        ahead = replace(
            config,
            algo=replace(config.algo, advantage="gae"),
            critic=CriticConfig(lr=1e-3, ahead_steps=1),
        )
        assert learn(ahead, critic)[0] == [8, 8]


@pytest.mark.parametrize("layout", ["PP2", "TP2 x CP2"])
def test_the_first_minibatch_is_scored_by_its_update(layout, backend, tmp_path):
    config = recipe(tiny_checkpoint(tmp_path / "model", "qwen2"), LAYOUTS[layout], **ALGO)
    run_on_ranks(score_early_and_late, config.parallel.world_size, backend, tmp_path, config)


@pytest.mark.crossed
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", [{}, dict(tensor=2, data=2), dict(pipeline=2)])
def test_bf16_weights_have_fp32_masters_that_hold_the_exact_folded_checkpoint(
    family, layout, backend, tmp_path
):
    from safetensors.torch import load_file

    from qurl_megatron.checkpoints.uaq import fold_uaq
    from qurl_megatron.tensors.arch import read_config

    folder = tiny_checkpoint(tmp_path / "model", family)
    expected = fold_uaq(load_file(folder / "model.safetensors"), read_config(folder), 1.5)
    config = recipe(folder, layout, dtype="bfloat16")
    run_on_ranks(check_masters, config.parallel.world_size, backend, tmp_path, config, expected)


@pytest.mark.parametrize("family", all_but(FAMILIES, "qwen3", "llama", "mistral"))
def test_gradients_equal_autograd_through_hugging_face(family, backend, tmp_path):
    from qurl_megatron.data.dealing import shuffled

    folder = tiny_checkpoint(tmp_path / "model", family)
    config = recipe(folder, dict(tensor=2, pipeline=2), kl_coef=0.1, entropy_coef=0.01)
    samples = random_samples(16)
    out = tmp_path / "gradients.pt"
    run_on_ranks(first_gradients, 4, backend, tmp_path, config, samples, out)
    actual = torch.load(out)
    # A lone process deals the same minibatches.
    first = shuffled(16, 2, seed=1)[0]
    expected = reference_gradients(folder, samples, first, config)
    for name, value in expected.items():
        assert relative(actual[name], value) < 2e-5, name
