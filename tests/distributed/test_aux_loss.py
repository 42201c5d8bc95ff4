"""The routers' auxiliary loss: its gradient, and the same one in every layout."""

from dataclasses import replace

import pytest
import torch

from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.actor.policy import Reference
from qurl_megatron.config import TrainConfig
from qurl_megatron.data.dealing import shuffled
from tests.support.models import as_stored, in_float64, random_samples, tiny_checkpoint
from tests.support.policies import (
    ALGO,
    EXPERT_LAYOUTS,
    LAYOUTS,
    PACKED,
    assert_same_training,
    build,
    of_the_first_minibatch,
    recipe,
    reference_gradients,
    relative,
    run,
)
from tests.support.ranks import run_on_ranks

COEF = 0.5  # large enough that it is most of a router's gradient
SAMPLES = random_samples(16)


def balanced(folder, layout, *, recompute=False, train=None):
    config = recipe(folder, layout, **ALGO)
    model = replace(config.model, router_aux_loss="model", recompute=recompute)
    return replace(config, model=model, train=TrainConfig(**train) if train else config.train)


@pytest.fixture(scope="module")
def alone_balanced(tmp_path_factory, backend):
    folder = tmp_path_factory.mktemp("alone")
    model = tiny_checkpoint(folder / "model", "qwen3_moe", router_aux_loss_coef=COEF)
    return model, run(folder, backend, balanced(model, {}), "whole")


@pytest.mark.parametrize(
    "layout, recompute, train",
    [
        ("TP2", False, PACKED),
        ("PP2", True, PACKED),
        ("DP2", False, PACKED),
        ("EP2 x DP2", True, {}),
        ("EP2 x CP2", False, PACKED),
        pytest.param("TP2 x CP2", True, PACKED, marks=pytest.mark.thorough),
        pytest.param("EP2 x PP2", False, PACKED, marks=pytest.mark.thorough),
    ],
)
def test_every_layout_balances_as_one_process_does(
    layout, recompute, train, alone_balanced, backend, tmp_path
):
    model, expected = alone_balanced
    sizes = {**LAYOUTS, **EXPERT_LAYOUTS}[layout]
    config = balanced(model, sizes, recompute=recompute, train=train)
    actual = run(tmp_path, backend, config, "split")
    assert_same_training(actual, expected)
    assert 1 < actual["metrics"][0]["policy/router_aux_loss"] < 2


def first_gradients(device, config, out) -> None:
    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks, reference=Reference())
        gradients = of_the_first_minibatch(policy, SAMPLES, config)
        if ranks.leads:
            metrics = policy.routing.metrics()
            torch.save((gradients, metrics["policy/router_aux_loss"].value), out)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_its_gradient_equals_autograd_in_float64(norm_topk_prob, backend, tmp_path):
    changes = dict(router_aux_loss_coef=COEF, norm_topk_prob=norm_topk_prob)
    folder = tiny_checkpoint(tmp_path / "model", "qwen3_moe", **changes)
    config = balanced(folder, {}, train=PACKED)
    run_on_ranks(first_gradients, 1, backend, tmp_path, config, tmp_path / "gradients.pt")
    gradients, value = torch.load(tmp_path / "gradients.pt")
    first = shuffled(16, 2, seed=1)[0]
    without = reference_gradients(folder, SAMPLES, first, config)
    added, mean = auxiliary(folder, first)
    assert value == pytest.approx(mean, rel=1e-6)
    for name, gradient in without.items():
        assert relative(gradients[name], gradient + added[name]) < 2e-5, name
        if name.endswith("mlp.gate.weight"):
            assert relative(gradients[name], gradient) > 0.1, "it is seen"


def auxiliary(folder, dealt):
    """Gradients of the loss alone, through transformers, and its mean over layers and responses."""
    model = in_float64(folder)
    experts, k = model.config.num_experts, model.config.num_experts_per_tok
    total = 0.0
    for i in dealt:
        sample = SAMPLES[i]
        ids = torch.tensor([[*sample.prompt.input_ids, *sample.response_ids]])
        for logits in model(ids, output_router_logits=True).router_logits:
            p = logits.view(-1, experts).softmax(-1)
            chosen = p.topk(k, -1).indices.flatten()
            share = chosen.bincount(minlength=experts) / len(chosen)
            total = total + experts * (share * p.mean(0)).sum() / len(dealt)
    (COEF * total).backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    stored = as_stored({name: gradient.float() for name, gradient in gradients.items()})
    return stored, total.item() / model.config.num_hidden_layers
