"""The layout of one step: which rank gets which responses, in which minibatch and microbatch.

A response keeps its place for the whole step, so scores computed once serve every epoch, and every
layout sums the same terms.

Every rank gets all responses, as flat CPU tensors that are never pickled: 13 bytes a token.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
import torch.distributed as dist

from qurl_megatron.actor.megatron import Ranks
from qurl_megatron.algo.aggregate import token_weights
from qurl_megatron.config import RunConfig
from qurl_megatron.data.dealing import deal, round_up, shuffled
from qurl_megatron.data.pack import TokenBatch, pack_samples, pad_samples
from qurl_megatron.data.responses import Responses, Summary
from qurl_megatron.observe.metrics import Max, Mean, Metric

Minibatch = list[TokenBatch]  # this data-parallel rank's microbatches of one optimizer update


def lay_out(ranks: Ranks, samples: Responses, config: RunConfig, *, step: int) -> list[Minibatch]:
    """Return this data-parallel rank's microbatches, on its device.

    All have one shape, unless ``train.max_tokens`` gives each its own.
    """
    summary, train = samples.summary, config.train
    # Context parallelism cuts every sequence into so many chunks, and sequence parallelism then
    # cuts each context rank's part.
    chunks = 1 if ranks.context.size == 1 else 2 * ranks.context.size
    multiple = chunks * ranks.tensor.size
    weights = _weights(counted_tokens(summary, config), config, step)
    lengths = [round_up(n, chunks if train.packed else multiple) for n in summary.totals]
    budget = 0
    if train.max_tokens:
        budget = max(multiple, train.max_tokens // multiple * multiple)

    def laid_out(microbatch: list[int]) -> TokenBatch:
        parts = [weights[i] for i in microbatch]
        if train.packed:
            return pack_samples(
                samples, microbatch, parts, sequence_multiple=chunks, multiple=multiple
            )
        length = max(lengths)
        if train.max_tokens:
            length = max(lengths[i] for i in microbatch)
        return pad_samples(samples, microbatch, parts, length=length)

    dealt = deal(
        _minibatches(len(summary), config, step),
        lengths,
        ranks.data.size,
        train.micro_batch,
        budget=budget,
        packed=train.packed,
        in_step=ranks.expert.size > 1,
    )
    minibatches = []
    for minibatch in dealt:
        own_microbatches = minibatch[ranks.data.rank]
        minibatches.append([laid_out(m).to(ranks.device) for m in own_microbatches])
    return minibatches


def averaged_without(
    rejected: Sequence[int],
    batches: Sequence[TokenBatch],
    summary: Summary,
    config: RunConfig,
    *,
    step: int,
) -> list[TokenBatch]:
    """Return the microbatches, with each minibatch averaged over the responses not rejected."""
    counted = counted_tokens(summary, config)
    for i in rejected:
        counted[i] = 0
    weights = _weights(counted, config, step)
    weighted = []
    for batch in batches:
        weights_R = batch.weights.new_tensor([weights[i] for i in batch.indices])
        weighted.append(replace(batch, weights=weights_R[batch.owners]))
    return weighted


def counted_tokens(summary: Summary, config: RunConfig) -> list[int]:
    """Return how many tokens of each response the loss averages over; 0 leaves a response out.

    Truncated responses are left out if the recipe masks them, and so are groups that dynamic
    sampling used as filler: penalties, bonuses and baselines of the whole batch would teach
    something even where all answers are equally right.
    """
    algo, size = config.algo, config.rollout.samples_per_prompt
    counted_R = summary.written_R.clone()
    if algo.dynamic_sampling:
        rewards_PG = summary.rewards_R.view(-1, size)
        useful_P = (rewards_PG != rewards_PG[:, :1]).any(1)
        counted_R[~useful_P.repeat_interleave(size)] = 0
    if algo.mask_truncated:
        counted_R[summary.truncated_R] = 0
    return counted_R.tolist()


def layout_metrics(batches: Sequence[TokenBatch], summary: Summary) -> dict[str, Metric]:
    """Return the share of padding in the microbatches, and how many the busiest rank has."""
    positions = sum(batch.input_ids.numel() for batch in batches)
    tokens = sum(summary.totals[i] for batch in batches for i in batch.indices)
    return {
        "train/padding_fraction": Mean(positions - tokens, positions),
        "train/passes": Max(len(batches)),
    }


def _weights(counted: Sequence[int], config: RunConfig, step: int) -> dict[int, float]:
    """Return the weight of a token of each response in the loss of its minibatch."""
    weights: dict[int, float] = {}
    for minibatch in _minibatches(len(counted), config, step):
        its_weights = token_weights(
            [counted[i] for i in minibatch],
            config.algo.aggregation,
            constant=config.rollout.max_new_tokens,
        )
        weights |= zip(minibatch, its_weights.tolist(), strict=True)
    return weights


def _minibatches(count: int, config: RunConfig, step: int) -> list[list[int]]:
    """Return the responses of each minibatch of a step."""
    # One seed per run and step; the factor keeps neighbouring runs from sharing their shuffles.
    seed = (config.train.seed * 1_000_003 + step) % 2**63
    group = config.rollout.samples_per_prompt if config.algo.deal == "groups" else 1
    return shuffled(count, config.algo.minibatches, seed, group)


def deliver(responses: Responses | None) -> Responses:
    """Return the step's responses on every rank; all ranks call it together.

    Args:
        responses: on the leading rank; None on the others.
    """
    count = torch.zeros(1, dtype=torch.int64)
    if responses is not None:
        count[0] = len(responses)
    dist.broadcast(count, 0)
    summary = Summary.empty(int(count))
    if responses is not None:
        summary = responses.summary
    for field in fields(summary):
        dist.broadcast(getattr(summary, field.name), 0)
    if responses is None:
        responses = Responses.empty(summary)
    for tensor in (responses.tokens, responses.mask, responses.behaviour):
        dist.broadcast(tensor, 0)
    return responses
