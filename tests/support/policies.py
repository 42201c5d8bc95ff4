"""Policies on several ranks: a tiny recipe, whole tensors of all ranks, training and resuming."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from qurl_megatron.actor.megatron import everywhere, megatron_runtime
from qurl_megatron.checkpoints.integrity import RECORD, read_record
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
from qurl_megatron.observe.metrics import Timer, merge, values
from qurl_megatron.training.state import TrainState
from tests.support.models import as_stored, in_float64, random_samples
from tests.support.ranks import run_on_ranks

LAYOUTS = {
    "TP2": dict(tensor=2),
    "PP2": dict(pipeline=2),
    "TP2 x PP2": dict(tensor=2, pipeline=2),
    "DP2": dict(data=2),
    "TP2 x DP2": dict(tensor=2, data=2),
    "CP2": dict(context=2),
    "TP2 x CP2": dict(tensor=2, context=2),
    "CP2 x DP2": dict(context=2, data=2),
    "PP2 x CP2": dict(pipeline=2, context=2),
}
EXPERT_LAYOUTS = {
    "EP2 x DP2": dict(expert=2, data=2),
    "EP2 x TP2": dict(expert=2, tensor=2),
    "EP2 x CP2": dict(expert=2, context=2),
    "EP2 x PP2": dict(expert=2, pipeline=2, data=2),
    "EP2 x DP4": dict(expert=2, data=4),  # two copies of each expert
    "EP4 x TP2 x DP2": dict(expert=4, tensor=2, data=2),
    "EP2 x PP2 x CP2": dict(expert=2, pipeline=2, context=2),
}
ALGO = dict(objective="acr", kl_coef=0.1, entropy_coef=0.01)
ROUNDING = {"qwen2_moe": 3e-5}
"""Of FP32 gradients, above the usual: that of its last queries is small, and in one process already
1e-5 from that in float64."""
SAMPLES = random_samples(8)
PACKED = dict(max_tokens=48, packed=True)
"""Settings of ``train`` with which a tiny batch takes several passes of several shapes."""


def recipe(folder: Path, parallel: dict, *, dtype="float32", **algo) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path=str(folder), dtype=dtype),
        data=DataConfig(task="chain_sum", prompts_per_step=4),
        rollout=RolloutConfig(samples_per_prompt=4, temperature=0.7),
        parallel=ParallelConfig(**parallel),
        optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.01),
        algo=AlgoConfig(minibatches=2, **algo),
        train=TrainConfig(micro_batch=2),
    )


def build(config: RunConfig, ranks, **kwargs):
    from qurl_megatron.actor.policy import Policy
    from qurl_megatron.training.train import alignment

    align = alignment(config, ranks.device)
    return Policy.build(
        config.model, config.parallel, config.optimizer, ranks, align=align, **kwargs
    )


def whole(policy, read=None) -> dict[str, torch.Tensor]:
    """Every Hugging Face tensor, joined from all ranks, on every rank."""
    return joined(hf_shards(policy, read))


def save_weights(policy, out: Path) -> None:
    weights = whole(policy)
    if policy.ranks.leads:
        torch.save(weights, out)


def assert_same_weights(actual_file: Path, expected_file: Path, *, rounding: float = 0.0) -> None:
    """Compare two files of ``save_weights``, bit for bit unless they may differ by rounding."""
    actual, expected = torch.load(actual_file), torch.load(expected_file)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if rounding:
            assert relative(actual[name], value) < rounding, name
        else:
            assert torch.equal(actual[name], value), name


def hf_shards(policy, read=None):
    """This rank's FP32 masters, or what is read of them; all ranks of its copies iterate."""
    for index in range(len(policy._parameters)):
        yield from policy.hf_parameter(index, read or policy._read_master)


def joined(shards) -> dict[str, torch.Tensor]:
    """Hugging Face tensors of all ranks' shards, on every rank, in its host's memory."""
    parts = [(s.name, s.dim, s.start, s.value.to("cpu", copy=True)) for s in shards]
    slices: dict[str, dict[int, tuple]] = {}
    for rank_parts in everywhere(parts):
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
        full, copies = parameter.main_grad.float(), policy.ranks.copies_of(parameter)
        if copies.size == 1:
            return full
        mine = torch.zeros_like(full).flatten()
        owned = policy.owned_range(parameter)
        mine[owned] = full.flatten()[owned]
        dist.all_reduce(mine, group=copies.group)
        return mine.view_as(full)

    return read


def delivered(ranks, samples) -> Responses:
    """What the leading rank has."""
    from qurl_megatron.training.layout import deliver

    return deliver(Responses.of(samples) if ranks.leads else None)


def of_the_first_minibatch(policy, samples, config: RunConfig) -> dict[str, torch.Tensor]:
    """Its gradients, whole, on every rank."""
    from qurl_megatron.training.credit import attach_advantages
    from qurl_megatron.training.layout import lay_out
    from qurl_megatron.training.losses import PolicyLoss, Scorer
    from qurl_megatron.training.routes import with_routes
    from qurl_megatron.training.step import attach_scores

    ranks = policy.ranks
    score = Scorer(policy, config.rollout.temperature)
    share = delivered(ranks, samples)
    laid = lay_out(ranks, share, config, step=1)
    if config.model.routing_replay == "rollout":
        laid = with_routes(ranks, policy.arch, share, laid)
    first = attach_scores(policy, laid[0], score, with_reference=True)
    first, _ = attach_advantages(ranks, first, share.summary, config)
    policy.accumulate(first, PolicyLoss(score, config.algo))
    return whole(policy, gradient(policy))


def first_gradients(device, config: RunConfig, samples, out: Path) -> None:
    from qurl_megatron.actor.policy import Reference

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks, reference=Reference())
        gradients = of_the_first_minibatch(policy, samples, config)
        if ranks.leads:
            torch.save(gradients, out)


def reference_gradients(
    folder, samples, dealt, config, *, prepare=lambda model, sample: None
) -> dict[str, torch.Tensor]:
    """Plain autograd through the Hugging Face model and the ACR formula as the paper writes it.

    Args:
        prepare: called with the model before it sees a sample.
    """
    model = in_float64(folder)
    algo, loss = config.algo, 0.0
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    groups = rewards.view(-1, config.rollout.samples_per_prompt)
    spread = groups - groups.mean(1, keepdim=True)
    advantages = (spread / (groups.std(1, keepdim=True) + 1e-6)).flatten()
    for i in dealt:
        sample = samples[i]
        prepare(model, sample)
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


def train_twice(device, config: RunConfig, samples, out: Path) -> None:
    """Gradients of the first minibatch, then the weights after two whole steps."""
    from qurl_megatron.actor.policy import Reference
    from qurl_megatron.training.step import improve

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks, reference=Reference())
        gradients = of_the_first_minibatch(policy, samples, config)
        seen, kept = [], []
        config = replace(config, train=replace(config.train, save_rollouts=True))
        for step in (1, 2):
            share = delivered(ranks, samples)
            scored = kept.append if ranks.leads else None
            learnt = improve(policy, share, config, step=step, timer=Timer(), scored=scored)
            gathered = everywhere(learnt)
            seen.append(values(merge(metrics for metrics, _ in gathered)))
            told = [item for _, advantages in gathered for item in advantages.items()]
        weights = whole(policy)
        if ranks.leads:
            done = {"gradients": gradients, "weights": weights, "metrics": seen}
            proximal = [[torch.from_numpy(step[i]) for i in range(len(step))] for step in kept]
            torch.save({**done, "advantages": sorted(told), "proximal": proximal}, out)


def run(tmp_path, backend, config, name, *, runner=run_on_ranks, body=train_twice) -> dict:
    samples = random_samples(16)
    out = tmp_path / f"{name}.pt"
    runner(body, config.parallel.world_size, backend, tmp_path, config, samples, out)
    return torch.load(out, weights_only=True)


def hf_scores(folder: Path, samples, temperature=1.0) -> list[torch.Tensor]:
    """Log-probs and entropies of what the policy wrote, [2, tokens] in float64 for each sample."""
    model = in_float64(folder)
    found = []
    for sample in samples:
        ids = torch.tensor([[*sample.prompt.input_ids, *sample.response_ids]])
        start = len(sample.prompt.input_ids)
        with torch.no_grad():
            rows = (model(ids).logits[0, start - 1 : -1] / temperature).log_softmax(-1)
        both = torch.stack(
            (rows.gather(1, ids[0, start:, None])[:, 0], -(rows.exp() * rows).sum(-1))
        )
        found.append(both[:, torch.tensor(sample.written)])
    return found


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


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def batches(ranks) -> list:
    from qurl_megatron.data.pack import pad_samples

    mine = range(len(SAMPLES))[ranks.data.rank :: ranks.data.size]
    whole = Responses.of(SAMPLES)
    return [pad_samples(whole, [i], [1.0], length=24).to(ranks.device) for i in mine]


def scores(policy, temperature=1.0) -> tuple[dict, dict]:
    """Log-probs of every sample's response, of the policy and of its reference, on every rank."""
    from qurl_megatron.training.losses import Scorer

    score = Scorer(policy, temperature)
    microbatches = batches(policy.ranks)

    def of_model() -> dict[int, torch.Tensor]:
        found = policy.score(microbatches, lambda logits, batch: score(logits, batch)[0])
        own = {b.indices[0]: x.cpu() for b, x in zip(microbatches, found, strict=False)}
        return {i: x for rank in everywhere(own) for i, x in rank.items()}

    own = of_model()
    with policy.reference():
        return own, of_model()


def improve_at(policy, config, step):
    from qurl_megatron.training.step import improve

    improve(policy, Responses.of(random_samples(16)), config, step=step, timer=Timer())


def save_then_go_on(device, config, run_dir, out, *, step=1):
    """Save after ``step`` updates, then make one more."""
    from qurl_megatron.training import checkpoint

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks)
        for index in range(step):
            improve_at(policy, config, 1 + index)
        state = TrainState(step, cursor={"epoch": 0}, accuracy_before=0.25, accuracy=0.5)
        checkpoint.save(run_dir, policy, state, keep=2)
        improve_at(policy, config, step + 1)
        save_weights(policy, out)


def load_and_go_on(device, config, run_dir, out, *, step=1, used=False):
    from qurl_megatron.training import checkpoint
    from qurl_megatron.training.newest import newest_whole

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks)
        path, state = newest_whole(run_dir, ranks)
        assert state == TrainState(step, {"epoch": 0}, 0.25, 0.5)
        files = {f.relative_to(path).as_posix() for f in path.rglob("*") if f.is_file()}
        assert read_record(path).keys() == files - {RECORD}
        if used:
            improve_at(policy, config, 7)  # which must not shine through
        checkpoint.load(path, policy)
        improve_at(policy, config, step + 1)
        save_weights(policy, out)


def assert_goes_on(
    saving: RunConfig,
    loading: RunConfig,
    backend: str,
    tmp_path: Path,
    *,
    rounding: float = 0.0,
    bodies=(save_then_go_on, load_and_go_on),
    runners=(run_on_ranks, run_on_ranks),
) -> None:
    """Saved by one run and loaded by another, a policy takes the same next step.

    The checkpoint is in ``tmp_path / "run"``, the weights after the next step in a.pt and b.pt.
    """
    saved, a, b = (tmp_path / name for name in ("run", "a.pt", "b.pt"))
    for place, (config, out) in enumerate(((saving, a), (loading, b))):
        world, arguments = config.parallel.world_size, (backend, tmp_path, config, saved, out)
        runners[place](bodies[place], world, *arguments)
    assert_same_weights(b, a, rounding=rounding)


def check_masters(device, config: RunConfig, expected: dict) -> None:
    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks, uaq_scale=1.5)
        weights = whole(policy)
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name
        parameter = next(policy.gpt.parameters())
        assert parameter.dtype == torch.bfloat16
