"""Decisions from the behaviour policy's distance, once per step, before any update.

Which responses are too far off to learn from, and by how much importance weights are scaled. Both
follow from the proximal and the behaviour policy, which no update moves.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from qurl_megatron.actor.megatron import Ranks
from qurl_megatron.algo import Limits, importance_weights, kept
from qurl_megatron.config import AlgoConfig, CorrectionConfig
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.observe.metrics import Max, Mean, Metric


def rejected_responses(ranks: Ranks, batches: Sequence[TokenBatch], count: int) -> list[int]:
    """Which of the step's ``count`` responses are rejected, on whatever data rank they lie."""
    rejected_R = torch.zeros(count, device=ranks.device)
    for batch in batches:
        if batch.kept is not None:
            owners = torch.tensor(batch.indices, device=ranks.device)[batch.owners]
            rejected_R[owners[~batch.kept]] = 1.0
    dist.all_reduce(rejected_R, group=ranks.data.group)
    return rejected_R.nonzero().flatten().tolist()


def attach_correction(
    ranks: Ranks, batches: Sequence[TokenBatch], algo: AlgoConfig, correction: CorrectionConfig
) -> tuple[list[TokenBatch], float, dict[str, Metric]]:
    """Mark rejected responses, then find the scale of the importance weights of all others.

    Returns:
        The microbatches, with the tokens of rejected responses marked; the factor that makes the
        mean importance weight of the tokens in the loss 1 (1.0 where ``correction.normalise`` is
        off); metrics.
    """
    if not ranks.last_stage:
        return list(batches), 1.0, {}
    batches, metrics = _marked(batches, correction) if correction.rejects else (list(batches), {})
    if not correction.normalise:
        return batches, 1.0, metrics
    scale = _weight_scale(ranks, batches, algo, correction)
    return batches, scale, metrics | {"correction/weight_scale": Max(scale)}


def _marked(
    batches: Sequence[TokenBatch], correction: CorrectionConfig
) -> tuple[list[TokenBatch], dict[str, Metric]]:
    marked = [
        replace(
            batch,
            kept=kept(
                batch.proximal,
                batch.behaviour,
                batch.owners,
                len(batch.lengths),
                low=correction.reject_low,
                high=correction.reject_high,
                veto=correction.veto,
            ),
        )
        for batch in batches
    ]
    rejected = sum(len(b.owners[~b.kept].unique()) for b in marked)
    return marked, {
        "correction/rejected_responses": Mean(
            float(rejected), float(sum(len(b.lengths) for b in marked))
        ),
        "correction/rejected_fraction": Mean(
            float(sum((~b.kept).sum().item() for b in marked)),
            float(sum(len(b.kept) for b in marked)),
        ),
    }


def _weight_scale(
    ranks: Ranks, batches: Sequence[TokenBatch], algo: AlgoConfig, correction: CorrectionConfig
) -> float:
    """One over the mean importance weight of the step's tokens in the loss, on all data ranks.

    A token of a rejected response is not among them: one rho of e^15 there would make the weights
    of all others nearly 0.
    """
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)  # of weights; of tokens
    for batch in batches:
        weights = importance_weights(
            batch.proximal,
            batch.behaviour,
            kind=algo.objective,
            limits=Limits.of(algo, correction),
            level=correction.level,
            owners=batch.owners,
            responses=len(batch.lengths),
        )
        counts = batch.weights > 0
        if batch.kept is not None:
            counts &= batch.kept
        total += torch.stack([weights[counts].double().sum(), counts.double().sum()])
    dist.all_reduce(total, group=ranks.data.group)
    # All weights are 0 where every token lies outside icepop's band: nothing to scale.
    return (total[1] / total[0]).item() if total[0] > 0 else 1.0
