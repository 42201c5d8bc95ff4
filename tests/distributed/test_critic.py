"""The critic's values and gradients are those of the whole model, however it is split."""

from dataclasses import replace

import pytest
import torch

from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.config import CriticConfig, OptimizerConfig, TrainConfig
from tests.support.cases import all_but
from tests.support.critics import (
    HEAD,
    assert_as_by_autograd,
    build,
    expected_of,
    learn,
    minibatch,
    named,
    observe,
)
from tests.support.models import tiny_checkpoint
from tests.support.policies import EXPERT_LAYOUTS, LAYOUTS, joined, recipe, relative
from tests.support.ranks import run_on_ranks

SPLIT = ("TP2", "PP2", "TP2 x PP2", "DP2", "CP2", "TP2 x CP2")


def run(tmp_path, backend, config, name) -> dict:
    out = tmp_path / f"{name}.pt"
    run_on_ranks(observe, config.parallel.world_size, backend, tmp_path, config, out)
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def qwen2(backend, tmp_path_factory):
    """A checkpoint and what one process, and float64, make of it."""
    tmp_path = tmp_path_factory.mktemp("critic")
    folder = tiny_checkpoint(tmp_path / "model", "qwen2")
    return folder, run(tmp_path, backend, recipe(folder, {}), "alone"), expected_of(folder)


@pytest.mark.parametrize(
    "layout", all_but(SPLIT, "PP2", "CP2", nccl=["TP2 x PP2", "DP2", "TP2 x CP2"])
)
def test_values_gradients_and_updates_equal_one_process_and_autograd(
    backend, layout, qwen2, tmp_path
):
    folder, alone, (expected, gradients, loss) = qwen2
    split = run(tmp_path, backend, recipe(folder, LAYOUTS[layout]), "split")
    assert_as_by_autograd(split, expected, gradients)
    for name in gradients:
        assert relative(split["gradients"][name], alone["gradients"][name]) < 1e-5, name
    norm = torch.stack([g.double().norm() for g in gradients.values()]).norm().item()
    assert split["metrics"][0]["critic/loss"] == pytest.approx(loss, rel=1e-5)
    assert split["metrics"][0]["critic/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for before, after in zip(alone["metrics"], split["metrics"], strict=True):
        assert after == pytest.approx(before, rel=1e-4, abs=1e-6)
    for name, weight in alone["weights"].items():
        assert relative(split["weights"][name], weight) < 1e-4, name


def test_values_of_sequences_that_lie_end_to_end_are_those_of_each(backend, qwen2, tmp_path):
    folder, _, (expected, gradients, _) = qwen2
    config = recipe(folder, LAYOUTS["TP2 x CP2"])
    config = replace(config, train=TrainConfig(max_tokens=64, packed=True))
    packed = run(tmp_path, backend, config, "packed")
    assert_as_by_autograd(packed, expected, gradients)


@pytest.mark.parametrize(
    "family, layout",
    [("llama", "TP2 x PP2"), ("qwen3_moe", "TP2 x PP2"), ("qwen3_moe", "EP2 x PP2")],
)
def test_other_families_have_critics_as_well(family, layout, backend, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", family)
    config = recipe(folder, {**LAYOUTS, **EXPERT_LAYOUTS}[layout])
    actual = run(tmp_path, backend, config, "split")
    expected, gradients, _ = expected_of(folder)
    assert_as_by_autograd(actual, expected, gradients, close=1e-4)


def check_first_updates(device, config) -> None:
    from qurl_megatron.training.losses import attach_values

    with megatron_runtime(config.parallel) as ranks:
        critic = build(config, ranks, CriticConfig(lr=1e-3, warmup_steps=2), head=False)
        critic.folder = config.model.path
        before = joined(named(critic))
        if ranks.last_stage:
            assert not any(b.values.any() for b in attach_values(critic, minibatch(ranks, 0)))
        assert learn(critic, 0)["critic/lr"] == pytest.approx(5e-4)
        once = joined(named(critic))
        assert learn(critic, 1)["critic/lr"] == pytest.approx(1e-3)
        twice = joined(named(critic))
        for name in before:
            assert torch.equal(before[name], once[name]) == (name not in HEAD), name
            assert not torch.equal(once[name], twice[name]), name


def test_a_critic_begins_with_zeros_and_its_body_follows_the_head(backend, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "qwen2")
    config = recipe(folder, dict(tensor=2))
    config = replace(config, optimizer=OptimizerConfig(lr=1.0, weight_decay=0.0))
    run_on_ranks(check_first_updates, 2, backend, tmp_path, config)


def check_masters(device, config, expected) -> None:
    from qurl_megatron.training.losses import attach_values

    with megatron_runtime(config.parallel) as ranks:
        critic = build(config, ranks)
        critic.folder = config.model.path
        masters = joined(named(critic, lambda p: p.main_param.detach().view(p.shape)))
        for name, value in expected.items():
            torch.testing.assert_close(masters[name], value, rtol=1e-6, atol=5e-7)
        assert {p.dtype for p in critic.gpt.parameters()} == {torch.bfloat16}
        assert attach_values(critic, minibatch(ranks, 0))[0].values.dtype == torch.float32


def test_a_body_is_exact_in_fp32_and_not_folded(backend, tmp_path):
    import json

    from safetensors.torch import load_file, save_file

    from qurl_megatron.checkpoints.uaq import fold_uaq
    from qurl_megatron.tensors.arch import read_config

    body = tiny_checkpoint(tmp_path / "body", "qwen2")
    plain, described = load_file(body / "model.safetensors"), read_config(body)
    save_file(fold_uaq(plain, described, 1.5), body / "model.safetensors")
    (body / "config.json").write_text(json.dumps(described))
    config = recipe(body, {}, dtype="bfloat16")
    expected = {name: value for name, value in plain.items() if name != "lm_head.weight"}
    run_on_ranks(check_masters, 1, backend, tmp_path, config, expected)
