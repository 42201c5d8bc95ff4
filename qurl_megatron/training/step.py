"""One rollout batch into updates: deal, pad, score, then one update per minibatch and epoch.

A response keeps its place for the whole step: the minibatch, the data-parallel rank and the
microbatch it is dealt to. So scores computed once serve every epoch, and no layout changes what is
summed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from qurl_megatron.algo import token_weights
from qurl_megatron.config import RunConfig
from qurl_megatron.data.pack import TokenBatch, pad_samples
from qurl_megatron.model.policy import Policy
from qurl_megatron.observe.metrics import Max, Mean, Metric, Timer, merge
from qurl_megatron.runtime.megatron import Ranks
from qurl_megatron.training.advantages import attach_advantages
from qurl_megatron.training.objective import PolicyLoss, Scorer, mismatch
from qurl_megatron.types import Sample

Minibatch = list[TokenBatch]  # this data-parallel rank's microbatches of one optimizer update


def improve(
    policy: Policy,
    samples: Sequence[Sample],
    config: RunConfig,
    *,
    step: int,
    timer: Timer,
) -> dict[str, Metric]:
    """Score the samples, then update the policy on them; all ranks call it with the same samples.

    Returns:
        This rank's metrics, to be merged over ranks.
    """
    score = Scorer(policy, config.rollout.temperature)
    minibatches = lay_out(policy.ranks, samples, config, step=step)
    with timer.phase("score"):
        minibatches = attach_scores(
            policy, minibatches, score, with_reference=config.algo.kl_coef > 0
        )
        minibatches = _map(
            minibatches, lambda flat: attach_advantages(policy.ranks, flat, samples, config)
        )
    seen: list[dict[str, Metric]] = []
    if policy.ranks.last_stage and policy.ranks.tensor.rank == 0:
        seen += [
            mismatch(batch, config.algo.cap) for minibatch in minibatches for batch in minibatch
        ]
    with timer.phase("train"):
        loss = PolicyLoss(score, config.algo)
        for _ in range(config.algo.epochs):
            for minibatch in minibatches:
                metrics = policy.accumulate(minibatch, loss)
                if policy.ranks.tensor.rank == 0:
                    seen += metrics
                seen.append(_optimizer_metrics(policy.apply()))
    merged = merge(seen)
    if "policy/loss" in merged:  # shares of a loss add up within an update; updates are averaged
        updates = config.algo.epochs * config.algo.minibatches
        merged["policy/loss"] = Mean(merged["policy/loss"].total, updates / policy.ranks.data.size)
    return merged


def deal(
    count: int, minibatches: int, data_size: int, micro_batch: int, seed: int
) -> list[list[list[list[int]]]]:
    """Indices of the responses, shuffled: ``[minibatch][data rank][microbatch][response]``.

    The minibatches do not depend on the layout: another number of ranks trains on the same ones.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return [
        [_chunks(update[rank::data_size], micro_batch) for rank in range(data_size)]
        for update in _chunks(order, count // minibatches)
    ]


def lay_out(
    ranks: Ranks, samples: Sequence[Sample], config: RunConfig, *, step: int
) -> list[Minibatch]:
    """This data-parallel rank's microbatches, all of one shape, on this rank's device."""
    algo = config.algo
    # Sequence parallelism needs a length that splits over the tensor ranks.
    multiple = ranks.tensor.size
    longest = max(len(s.prompt.input_ids) + len(s.response_ids) for s in samples)
    length = -(-longest // multiple) * multiple
    dealt = deal(
        len(samples),
        algo.minibatches,
        ranks.data.size,
        config.train.micro_batch,
        seed=_mix(config.train.seed, step),
    )
    minibatches = []
    for update in dealt:
        everywhere = [i for rank in update for microbatch in rank for i in microbatch]
        weights = dict(
            zip(
                everywhere,
                token_weights(
                    [len(samples[i].response_ids) for i in everywhere], algo.aggregation
                ).tolist(),
                strict=True,
            )
        )
        minibatches.append(
            [
                pad_samples(
                    [samples[i] for i in microbatch],
                    [weights[i] for i in microbatch],
                    length=length,
                    indices=microbatch,
                ).to(ranks.device)
                for microbatch in update[ranks.data.rank]
            ]
        )
    return minibatches


def attach_scores(
    policy: Policy, minibatches: list[Minibatch], score: Scorer, *, with_reference: bool
) -> list[Minibatch]:
    """The same microbatches with proximal (and reference) log-probs of their response tokens, [N].

    Only the last pipeline stage computes them, and only it reads them.
    """
    return _map(minibatches, lambda flat: _scored(policy, flat, score, with_reference))


def _scored(
    policy: Policy, flat: list[TokenBatch], score: Scorer, with_reference: bool
) -> list[TokenBatch]:
    proximal = policy.score(flat, lambda logits, batch: score(logits, batch)[0])
    reference = []
    if with_reference:
        with policy.reference():
            reference = policy.score(flat, lambda logits, batch: score(logits, batch)[0])
    if proximal:
        flat = [replace(batch, proximal=p) for batch, p in zip(flat, proximal, strict=True)]
    if reference:
        flat = [replace(batch, reference=r) for batch, r in zip(flat, reference, strict=True)]
    return flat


def _map(
    minibatches: list[Minibatch], change: Callable[[list[TokenBatch]], list[TokenBatch]]
) -> list[Minibatch]:
    """``change`` on the microbatches of all minibatches at once."""
    changed = iter(change([batch for minibatch in minibatches for batch in minibatch]))
    return [[next(changed) for _ in minibatch] for minibatch in minibatches]


def _optimizer_metrics(measured: dict[str, float]) -> dict[str, Metric]:
    return {
        "optimizer/grad_norm": Mean(measured["optimizer/grad_norm"], 1.0),
        "optimizer/lr": Max(measured["optimizer/lr"]),
    }


def _chunks(items: list, size: int) -> list[list]:
    assert len(items) % size == 0, f"{len(items)} items do not divide into chunks of {size}"
    return [items[i : i + size] for i in range(0, len(items), size)]


def _mix(seed: int, step: int) -> int:
    """One seed per run and step; the factor keeps neighbouring runs from sharing their shuffles."""
    return (seed * 1_000_003 + step) % 2**63
