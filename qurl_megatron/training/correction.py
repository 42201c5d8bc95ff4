"""What the distance of the behaviour policy decides once per step, before any update.

Which responses are too far off to learn from, and by how much importance weights are scaled. Both
follow from the proximal and the behaviour policy, which no update moves.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from qurl_megatron.algo import Limits, importance_weights, kept
from qurl_megatron.config import AlgoConfig, CorrectionConfig
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.observe.metrics import Max, Mean, Metric
from qurl_megatron.runtime.megatron import Ranks


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
    """What the behaviour policy's distance decides once per step, before any update.

    Returns:
        The microbatches, with the tokens of rejected responses marked; the factor that makes the
        mean importance weight 1 (1.0 where ``correction.normalise`` is off); metrics.
    """
    if not ranks.last_stage:
        return list(batches), 1.0, {}
    metrics: dict[str, Metric] = {}
    scale = 1.0
    if correction.normalise:
        weights = [
            importance_weights(
                batch.proximal,
                batch.behaviour,
                kind=algo.objective,
                limits=Limits.of(algo, correction),
                level=correction.level,
                owners=batch.owners,
                responses=len(batch.lengths),
            )
            for batch in batches
        ]
        total = torch.tensor(
            [sum(w.double().sum().item() for w in weights), float(sum(map(len, weights)))],
            dtype=torch.float64,
            device=ranks.device,
        )
        dist.all_reduce(total, group=ranks.data.group)
        # All weights are 0 where every token lies outside icepop's band: nothing to scale.
        scale = (total[1] / total[0]).item() if total[0] > 0 else 1.0
        metrics["correction/weight_scale"] = Max(scale)
    if not correction.rejects:
        return list(batches), scale, metrics
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
    metrics["correction/rejected_responses"] = Mean(
        float(rejected), float(sum(len(b.lengths) for b in marked))
    )
    metrics["correction/rejected_fraction"] = Mean(
        float(sum((~b.kept).sum().item() for b in marked)),
        float(sum(len(b.kept) for b in marked)),
    )
    return marked, scale, metrics
