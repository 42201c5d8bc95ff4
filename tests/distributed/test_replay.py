"""Replayed experts are those that were chosen, on every rank and in every pass."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.config import TrainConfig
from qurl_megatron.data.dealing import shuffled
from qurl_megatron.data.responses import Responses
from qurl_megatron.observe.metrics import Timer
from tests.support.models import random_samples, tiny_checkpoint
from tests.support.models import with_routes as routed
from tests.support.policies import (
    ALGO,
    EXPERT_LAYOUTS,
    LAYOUTS,
    PACKED,
    assert_same_training,
    build,
    first_gradients,
    recipe,
    reference_gradients,
    relative,
    train_twice,
    whole,
)
from tests.support.ranks import run_on_ranks

LAYERS, EXPERTS, K = 4, 4, 2
SAMPLES = routed(random_samples(16), LAYERS, EXPERTS, K)


def replaying(folder, layout, mode="rollout", *, recompute=False, **algo):
    config = recipe(folder, layout, **algo)
    model = replace(config.model, routing_replay=mode, recompute=recompute)
    return replace(config, model=model)


@pytest.fixture(scope="module")
def alone_replaying(tmp_path_factory, backend):
    folder = tmp_path_factory.mktemp("alone")
    model = tiny_checkpoint(folder / "model", "qwen3_moe")
    config = replaying(model, {}, **ALGO)
    run_on_ranks(train_twice, 1, backend, folder, config, SAMPLES, folder / "out.pt")
    return model, torch.load(folder / "out.pt")


@pytest.mark.parametrize(
    "layout, recompute, train",
    [
        pytest.param("TP2", False, {}, marks=pytest.mark.thorough),
        ("TP2 x CP2", False, PACKED),
        ("PP2", True, {}),
        ("EP2 x PP2", True, PACKED),
        pytest.param("EP2 x CP2", False, {}, marks=pytest.mark.thorough),
        pytest.param("EP2 x TP2", True, {}, marks=pytest.mark.thorough),
    ],
)
def test_every_layout_replays_what_one_process_does(
    layout, recompute, train, alone_replaying, backend, tmp_path
):
    model, expected = alone_replaying
    config = replaying(model, {**LAYOUTS, **EXPERT_LAYOUTS}[layout], recompute=recompute, **ALGO)
    if train:
        config = replace(config, train=TrainConfig(**train))
    out = tmp_path / "split.pt"
    run_on_ranks(train_twice, config.parallel.world_size, backend, tmp_path, config, SAMPLES, out)
    actual = torch.load(out)
    assert_same_training(actual, expected)
    told = actual["metrics"][0]
    assert 0.3 < told["policy/routes_differ_fraction"] < 1
    assert 1 < told["policy/expert_load_max"] < 2


def test_gradients_equal_autograd_with_the_same_experts(backend, tmp_path):
    """Of transformers in float64, whose routers are told the experts."""
    folder = tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    algo = {**ALGO, "kl_coef": 0.0}  # the reference chooses its own
    config = replaying(folder, dict(expert=2, data=2), recompute=True, **algo)
    out = tmp_path / "gradients.pt"
    run_on_ranks(first_gradients, 2, backend, tmp_path, config, SAMPLES, out)
    actual = torch.load(out)
    first = shuffled(16, 2, seed=1)[0]
    for name, value in reference_gradients(folder, SAMPLES, first, config, prepare=tell).items():
        assert relative(actual[name], value) < 2e-5, name


def tell(model, sample) -> None:
    for layer in range(LAYERS):
        gate = model.model.layers[layer].mlp.gate
        given = torch.from_numpy(sample.routes[:, layer].astype(int)) - 1
        gate.forward = partial(told, gate, given)


def told(gate, given, hidden):
    """A router's forward with the first tokens' experts given."""
    logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
    probabilities = logits.softmax(-1)
    chosen = probabilities.topk(K, -1).indices
    chosen[: len(given)] = given
    weights = probabilities.gather(-1, chosen)
    return logits, weights / weights.sum(-1, keepdim=True), chosen


def replay_the_proximal(device, config, out) -> None:
    """Choices recorded while scoring, and the same ones given as if engines had made them."""
    from qurl_megatron.training.layout import lay_out
    from qurl_megatron.training.losses import Scorer
    from qurl_megatron.training.step import attach_scores, improve

    def learn(mode, samples) -> tuple[dict, float | None]:
        changed = replace(config, model=replace(config.model, routing_replay=mode))
        policy = build(changed, ranks)
        metrics, _ = improve(policy, Responses.of(samples), changed, step=1, timer=Timer())
        differ = metrics.get("policy/routes_differ_fraction")
        return whole(policy), differ and differ.value

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks)
        laid = lay_out(ranks, Responses.of(SAMPLES), config, step=1)
        batches = [batch for minibatch in laid for batch in minibatch]
        score = Scorer(policy, config.rollout.temperature)
        scored = attach_scores(policy, batches, score, with_reference=False, record=True)
        chosen = {}
        for batch in scored:
            rows, length = batch.input_ids.shape
            of_rows = batch.routes.unflatten(0, (length, rows)).transpose(0, 1)
            chosen |= zip(batch.indices, of_rows.cpu().numpy(), strict=True)
        samples = []
        for i, sample in enumerate(SAMPLES):
            tokens = len(sample.prompt.input_ids) + len(sample.response_ids)
            samples.append(replace(sample, routes=chosen[i][:tokens]))
        (proximal, differ), (rollout, same) = learn("proximal", SAMPLES), learn("rollout", samples)
        assert 0 < differ < 1 and 0 < same < 1
        for name, value in rollout.items():
            assert relative(proximal[name], value) < 1e-6, name
        free, _ = learn("off", SAMPLES)
        assert any(relative(proximal[name], x) > 1e-3 for name, x in free.items())


def test_the_proximal_policys_experts_are_kept_through_a_steps_updates(backend, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    config = replaying(folder, {}, "proximal")
    config = replace(config, optimizer=replace(config.optimizer, lr=3e-2))
    run_on_ranks(replay_the_proximal, 1, backend, tmp_path, config, tmp_path / "out")
