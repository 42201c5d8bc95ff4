"""Loss and gradients do not depend on how the model is split; masters keep what BF16 drops."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.actor.reference import Reference
from qurl_megatron.config import (
    AlgoConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from qurl_megatron.data.responses import Responses
from tests.cases import all_but
from tests.support.models import (
    FAMILIES,
    as_stored,
    random_samples,
    tiny_checkpoint,
)
from tests.support.ranks import run_on_ranks

LAYOUTS = {
    "TP2": dict(tensor=2),
    "TP2 without sequence parallelism": dict(tensor=2, sequence=False),
    "PP2": dict(pipeline=2),
    "TP2 x PP2": dict(tensor=2, pipeline=2),
    "DP2": dict(data=2),
    "TP2 x DP2": dict(tensor=2, data=2),
    "CP2": dict(context=2),
    "TP2 x CP2": dict(tensor=2, context=2),
    "CP2 x DP2": dict(context=2, data=2),
    "PP2 x CP2": dict(pipeline=2, context=2),
}
ALGO = dict(objective="acr", kl_coef=0.1, entropy_coef=0.01)


def recipe(folder: Path, parallel: dict, *, dtype="float32", distributed=True, **algo) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path=str(folder), dtype=dtype),
        data=DataConfig(task="chain_sum", prompts_per_step=4),
        rollout=RolloutConfig(samples_per_prompt=4, temperature=0.7),
        parallel=ParallelConfig(**parallel),
        optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.01, distributed=distributed),
        algo=AlgoConfig(minibatches=2, **algo),
        train=TrainConfig(micro_batch=2),
    )


def build(config: RunConfig, ranks, **kwargs):
    from qurl_megatron.actor.policy import Policy
    from qurl_megatron.training.models import alignment

    align = alignment(config, ranks.device)
    return Policy.build(
        config.model, config.parallel, config.optimizer, ranks, align=align, **kwargs
    )


def whole(policy, read=None) -> dict[str, torch.Tensor]:
    """Every Hugging Face tensor, joined from all ranks, on every rank."""
    return joined(hf_shards(policy, read))


def hf_shards(policy, read=None):
    """This rank's FP32 masters, or what is read of them; all ranks of its copies iterate."""
    for index in range(policy.parameter_count):
        yield from policy.hf_parameter(index, read or policy._master)


def joined(shards) -> dict[str, torch.Tensor]:
    """Hugging Face tensors of all ranks' shards, on every rank, in its host's memory."""
    parts = [(s.name, s.dim, s.start, s.value.to("cpu", copy=True)) for s in shards]
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, parts)
    slices: dict[str, dict[int, tuple]] = {}
    for rank_parts in gathered:
        for name, split_dim, offset, value in rank_parts:
            slices.setdefault(name, {})[offset] = (split_dim, value)
    return {
        name: by_offset[0][1]
        if by_offset[0][0] is None
        else torch.cat([by_offset[o][1] for o in sorted(by_offset)], dim=by_offset[0][0])
        for name, by_offset in slices.items()
    }


def gradient(policy):
    """Reads a parameter's reduced gradient, of which each copy of it may hold only a range."""

    def read(parameter):
        full = parameter.main_grad.float()
        if policy.ranks.copies.size == 1 or not policy.model.ddp_config.use_distributed_optimizer:
            return full
        mine = torch.zeros_like(full).flatten()
        owned = policy.owned_range(parameter)
        mine[owned] = full.flatten()[owned]
        dist.all_reduce(mine, group=policy.ranks.copies.group)
        return mine.view_as(full)

    return read


def delivered(ranks, samples, config, *, step: int) -> Responses:
    """This rank's share of what the leading rank has."""
    from qurl_megatron.training.layout import deliver, shares

    whole = Responses.of(samples) if ranks.leads else None
    return deliver(ranks, whole, partial(shares, ranks, config=config, step=step))


def of_the_first_minibatch(policy, samples, config: RunConfig) -> dict[str, torch.Tensor]:
    """Its gradients, whole, on every rank."""
    from qurl_megatron.training.credit import attach_advantages
    from qurl_megatron.training.layout import lay_out
    from qurl_megatron.training.losses import PolicyLoss, Scorer
    from qurl_megatron.training.step import attach_scores

    ranks = policy.ranks
    score = Scorer(policy, config.rollout.temperature)
    share = delivered(ranks, samples, config, step=1)
    laid = lay_out(ranks, share, config, step=1)
    first = attach_scores(policy, laid[0], score, with_reference=True)
    first, _ = attach_advantages(ranks, first, share.summary, config)
    policy.accumulate(first, PolicyLoss(score, config.algo))
    return whole(policy, gradient(policy))


def train_twice(device, config: RunConfig, samples, out: Path) -> None:
    """Gradients of the first minibatch, then the weights after two whole steps."""
    from qurl_megatron.observe.metrics import Timer, merge, values
    from qurl_megatron.training.step import improve

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks, reference=Reference())
        gradients = of_the_first_minibatch(policy, samples, config)
        seen, kept = [], []
        config = replace(config, train=replace(config.train, save_rollouts=True))
        for step in (1, 2):
            share = delivered(ranks, samples, config, step=step)
            scored = kept.append if ranks.leads else None
            learnt = improve(policy, share, config, step=step, timer=Timer(), scored=scored)
            gathered: list = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, learnt)
            seen.append(values(merge(metrics for metrics, _ in gathered)))
            told = [item for _, advantages in gathered for item in advantages.items()]
        weights = whole(policy)
        if ranks.leads:
            done = {"gradients": gradients, "weights": weights, "metrics": seen}
            proximal = [[torch.from_numpy(step[i]) for i in range(len(step))] for step in kept]
            torch.save({**done, "advantages": sorted(told), "proximal": proximal}, out)


def run(tmp_path, backend, config, name) -> dict:
    samples = random_samples(16)
    out = tmp_path / f"{name}.pt"
    run_on_ranks(train_twice, config.parallel.world_size, backend, tmp_path, config, samples, out)
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize(
    "layout",
    all_but(
        LAYOUTS,
        "TP2 x DP2",
        "CP2 x DP2",
        "PP2 x CP2",
        nccl=["TP2 x PP2", "DP2", "TP2 x CP2", "TP2 without sequence parallelism"],
    ),
)
def test_gradients_and_updates_equal_one_process(backend, layout, alone, tmp_path):
    folder, expected = alone("qwen2", **ALGO)
    assert_same_training(
        run(tmp_path, backend, recipe(folder, LAYOUTS[layout], **ALGO), "split"), expected
    )


def assert_same_training(actual: dict, expected: dict, *, rounding: float = 1e-5) -> None:
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for name, value in expected["gradients"].items():
        assert relative(actual["gradients"][name], value) < rounding, name
    for name, value in expected["weights"].items():
        # Adam divides by the gradient's own size, which turns rounding of tiny gradients
        # into steps.
        assert relative(actual["weights"][name], value) < 10 * rounding, name
    # What the rollouts' file gets, of every response, wherever it was scored.
    torch.testing.assert_close(actual["proximal"], expected["proximal"], rtol=1e-3, atol=1e-4)
    # Each response that is kept has one rank that tells of it.
    indices, advantages = zip(*actual["advantages"], strict=True)
    assert len(indices) == 8 and (indices, pytest.approx(advantages, abs=1e-5)) == tuple(
        zip(*expected["advantages"], strict=True)
    )
    for after, before in zip(actual["metrics"], expected["metrics"], strict=True):
        for name in before.keys() - {"train/passes", "train/padding_fraction"}:
            assert after[name] == pytest.approx(before[name], rel=2e-3, abs=1e-5), name


@pytest.mark.parametrize("family", all_but(["qwen3", "llama", "qwen3_moe"], "llama"))
def test_other_families_split_as_well(family, alone, backend, tmp_path):
    folder, expected = alone(family, **ALGO)
    config = recipe(folder, dict(tensor=2, pipeline=2), **ALGO)
    assert_same_training(run(tmp_path, backend, config, "split"), expected)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def check_masters(device, config: RunConfig, expected: dict) -> None:
    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks, uaq_scale=1.5)
        weights = whole(policy)
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name
        parameter = next(policy.gpt.parameters())
        assert parameter.dtype == torch.bfloat16


@pytest.mark.crossed
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "layout, distributed", [({}, True), (dict(tensor=2, data=2), True), (dict(pipeline=2), False)]
)
def test_bf16_weights_have_fp32_masters_that_hold_the_exact_folded_checkpoint(
    family, layout, distributed, backend, tmp_path
):
    from safetensors.torch import load_file

    from qurl_megatron.checkpoints import fold_uaq
    from qurl_megatron.tensors.arch import read_config

    folder = tiny_checkpoint(tmp_path / "model", family)
    expected = fold_uaq(load_file(folder / "model.safetensors"), read_config(folder), 1.5)
    config = recipe(folder, layout, dtype="bfloat16", distributed=distributed)
    run_on_ranks(check_masters, config.parallel.world_size, backend, tmp_path, config, expected)


def reference_gradients(folder, samples, dealt, config) -> dict[str, torch.Tensor]:
    """Plain autograd through the Hugging Face model and the ACR formula as the paper writes it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        experts_implementation="eager",  # the others have no float64
    )
    algo, loss = config.algo, 0.0
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    groups = rewards.view(-1, config.rollout.samples_per_prompt)
    spread = groups - groups.mean(1, keepdim=True)
    advantages = (spread / (groups.std(1, keepdim=True) + 1e-6)).flatten()
    for i in dealt:
        sample = samples[i]
        ids = torch.tensor([[*sample.prompt.input_ids, *sample.response_ids]])
        logits = model(ids).logits[0] / config.rollout.temperature
        start, count = len(sample.prompt.input_ids), len(sample.response_ids)
        rows = logits[start - 1 : start - 1 + count].log_softmax(-1)
        current = rows.gather(1, ids[0, start:, None])[:, 0]
        proximal = current.detach()
        rho = (
            proximal - torch.tensor(sample.behaviour_log_probs.tolist(), dtype=torch.float64)
        ).exp()
        r = (algo.cap / rho).clamp(max=1.0)
        ratio, A = (current - proximal).exp(), advantages[i]
        bounded = torch.maximum(
            torch.minimum(ratio, (1 + algo.clip_high) / r), torch.tensor(1 - algo.clip_low)
        )
        J = rho.clamp(max=algo.cap) * torch.minimum(ratio * A, bounded * A)
        log_x = proximal - current  # the reference is the policy itself, before any update
        kl = log_x.exp() - log_x - 1
        entropy = -(rows.exp() * rows).sum(-1)
        J = J - algo.kl_coef * kl + algo.entropy_coef * entropy
        loss = loss - J[torch.tensor(sample.written)].mean() / len(dealt)
    loss.backward()
    return as_stored({name: p.grad.float() for name, p in model.named_parameters()})


def first_gradients(device, config, samples, out) -> None:
    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks, reference=Reference())
        gradients = of_the_first_minibatch(policy, samples, config)
        if ranks.leads:
            torch.save(gradients, out)


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
