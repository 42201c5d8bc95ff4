"""The worth of each response token, fixed once per step before any update moves the policy.

First the correction, from the distance of the behaviour policy: which responses are too far off
to learn from. Then advantages and returns.

Every rank knows rewards and lengths of all responses of the step, but only the scores of its own
microbatches: figures of a whole group, or of the whole batch, are summed over the data-parallel
ranks. Pipeline stages before the last have no scores and need no advantages.

The environment's words between two turns of the policy are part of the transition from the last
token of one turn to the first of the next. The critic values the latter with these words read, and
neither gamma nor lambda counts them as steps.

Shapes: R = responses of the step; n = tokens that the policy wrote, of this rank's microbatches
together.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.actor.megatron import Ranks
from qurl_megatron.algo.advantages import ESTIMATES, BatchFacts
from qurl_megatron.algo.kl import kl_penalty
from qurl_megatron.algo.ratios import kept
from qurl_megatron.config import CorrectionConfig, RunConfig
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.data.responses import Summary
from qurl_megatron.observe.metrics import Mean, Metric
from qurl_megatron.rewards import overlong_penalty
from qurl_megatron.training.layout import averaged_without
from qurl_megatron.training.losses import with_scores


def attach_worth(
    ranks: Ranks, batches: Sequence[TokenBatch], summary: Summary, config: RunConfig, *, step: int
) -> tuple[list[TokenBatch], dict[str, Metric]]:
    """Return the microbatches with what each token is worth, and metrics; all ranks call it."""
    corrected, rejections = attach_correction(ranks, batches, config.correction)
    if ranks.last_stage and config.correction.rejects:
        rejected = rejected_responses(ranks, corrected, len(summary))
        corrected = averaged_without(rejected, corrected, summary, config, step=step)
    worth, metrics = attach_advantages(ranks, corrected, summary, config)
    return worth, rejections | metrics


def attach_correction(
    ranks: Ranks, batches: Sequence[TokenBatch], correction: CorrectionConfig
) -> tuple[list[TokenBatch], dict[str, Metric]]:
    """Return the microbatches, with the tokens of rejected responses marked; and metrics."""
    if not (ranks.last_stage and correction.rejects):
        return list(batches), {}
    marked = []
    responses = rejected_count = tokens = rejected_tokens = 0
    for batch in batches:
        kept_N = kept(
            batch.proximal,
            batch.behaviour,
            batch.owners,
            len(batch.lengths),
            low=correction.reject_low,
            high=correction.reject_high,
            veto=correction.veto,
        )
        marked.append(replace(batch, kept=kept_N))
        responses += len(batch.lengths)
        rejected_count += len(batch.owners[~kept_N].unique())
        tokens += len(kept_N)
        rejected_tokens += int((~kept_N).sum())
    return marked, {
        "correction/rejected_responses": Mean(float(rejected_count), float(responses)),
        "correction/rejected_fraction": Mean(float(rejected_tokens), float(tokens)),
    }


def rejected_responses(ranks: Ranks, batches: Sequence[TokenBatch], count: int) -> list[int]:
    """Return the rejected among the step's ``count`` responses, by index, over all data ranks."""
    rejected_R = torch.zeros(count, device=ranks.device)
    for batch in batches:
        if batch.kept is not None:
            owners = torch.tensor(batch.indices, device=ranks.device)[batch.owners]
            rejected_R[owners[~batch.kept]] = 1.0
    dist.all_reduce(rejected_R, group=ranks.data.group)
    return rejected_R.nonzero().flatten().tolist()


def attach_advantages(
    ranks: Ranks, batches: Sequence[TokenBatch], summary: Summary, config: RunConfig
) -> tuple[list[TokenBatch], dict[str, Metric]]:
    """Return the microbatches with advantages (and, with a critic, returns), [N]; and metrics.

    Args:
        batches: this rank's microbatches of the step, scored.
        summary: of all responses of the step, prompt-major.
    """
    if not ranks.last_stage:
        return list(batches), {}
    algo = config.algo
    rewards_R = shaped_rewards(summary, config).to(ranks.device)
    metrics: dict[str, Metric] = {}
    lengths_r = rewards_R.new_tensor([*chain(*(b.lengths for b in batches))], dtype=torch.int64)
    penalty_n = rewards_R.new_zeros(int(lengths_r.sum()))
    if algo.kl_coef and algo.kl_in == "reward":
        penalties = []
        for b in batches:
            penalties.append(
                kl_penalty(b.proximal, b.reference, algo.kl_estimator, highest=algo.kl_max)
            )
        kl_n = torch.cat(penalties)
        penalty_n = algo.kl_coef * kl_n
        metrics["reference/kl"] = Mean(kl_n.double().sum().item(), float(len(kl_n)))
    values_n = None
    if batches[0].values is not None:
        values_n = torch.cat([b.values for b in batches])
    facts = BatchFacts(
        rewards_R=rewards_R,
        group_size=config.rollout.samples_per_prompt,
        indices_r=rewards_R.new_tensor([*chain(*(b.indices for b in batches))], dtype=torch.int64),
        lengths_r=lengths_r,
        penalty_N=penalty_n,
        values_N=values_n,
        gamma=algo.gamma,
        lam=algo.gae_lambda,
        group=ranks.data.group,
    )
    advantages_n, returns_n = ESTIMATES[algo.advantage](facts)
    metrics["advantage/abs_mean"] = Mean(
        advantages_n.double().abs().sum().item(), float(len(advantages_n))
    )
    sizes = [len(batch.owners) for batch in batches]
    scored = with_scores(batches, "advantages", advantages_n.split(sizes))
    if returns_n is not None:
        scored = with_scores(scored, "returns", returns_n.split(sizes))
    return scored, metrics


def shaped_rewards(summary: Summary, config: RunConfig) -> Tensor:
    """Return the verifier's rewards less the penalties of overlong responses, [R] float32."""
    reward, limit = config.reward, config.rollout.max_new_tokens
    shaped = []
    for reward_given, length in zip(summary.rewards_R.tolist(), summary.written, strict=True):
        penalty = overlong_penalty(length, limit, reward.overlong_fraction, reward.overlong_penalty)
        shaped.append(reward_given + penalty)
    return torch.tensor(shaped, dtype=torch.float32)
