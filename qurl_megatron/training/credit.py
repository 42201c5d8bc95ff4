"""Advantages and returns of response tokens, once all models have scored the batch.

Every rank knows rewards and lengths of all responses of the step, but only the scores of its own
microbatches: figures of a whole group of responses, or of the whole batch, are summed over the
data-parallel ranks. Pipeline stages before the last have no scores and need no advantages.

The environment's words between two turns of the policy are part of the transition from the last
token of one turn to the first of the next. The critic values the latter with these words read, and
neither gamma nor lambda counts them as steps.

Shapes: R = responses of the step, P x G = prompts and responses to each; n = tokens that the policy
wrote and r = responses of this rank's microbatches together.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from qurl_megatron.actor.megatron import Ranks
from qurl_megatron.algo import kl_penalty, token_advantages
from qurl_megatron.config import RunConfig
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.data.responses import Summary
from qurl_megatron.observe.metrics import Mean, Metric
from qurl_megatron.rewards import overlong_penalty


def attach_advantages(
    ranks: Ranks, batches: Sequence[TokenBatch], summary: Summary, config: RunConfig
) -> tuple[list[TokenBatch], dict[str, Metric]]:
    """The same microbatches with advantages (and, with a critic, returns), [N]; and metrics.

    Args:
        batches: this rank's microbatches of the step, scored.
        summary: of all responses of the step, prompt-major.
    """
    if not ranks.last_stage:
        return list(batches), {}
    algo = config.algo
    rewards_R = shaped_rewards(summary, config).to(ranks.device)
    metrics: dict[str, Metric] = {}
    penalty_n = None
    if algo.kl_coef and algo.kl_in == "reward":
        kl_n = torch.cat(
            [
                kl_penalty(b.proximal, b.reference, algo.kl_estimator, highest=algo.kl_max)
                for b in batches
            ]
        )
        penalty_n = algo.kl_coef * kl_n
        metrics["reference/kl"] = Mean(kl_n.double().sum().item(), float(len(kl_n)))
    advantages_n, returns_n = token_advantages(
        rewards_R,
        list(chain(*(b.lengths for b in batches))),
        algo.advantage,
        group_size=config.rollout.samples_per_prompt,
        indices=list(chain(*(b.indices for b in batches))),
        penalty=penalty_n,
        values=None if batches[0].values is None else torch.cat([b.values for b in batches]),
        gamma=algo.gamma,
        lam=algo.gae_lambda,
        group=ranks.data.group,
    )
    metrics["advantage/abs_mean"] = Mean(
        advantages_n.double().abs().sum().item(), float(len(advantages_n))
    )
    sizes = [len(batch.owners) for batch in batches]
    parts = advantages_n.split(sizes)
    returns = [None] * len(batches) if returns_n is None else returns_n.split(sizes)
    return [
        replace(batch, advantages=a, returns=r)
        for batch, a, r in zip(batches, parts, returns, strict=True)
    ], metrics


def shaped_rewards(summary: Summary, config: RunConfig) -> Tensor:
    """Return the verifier's rewards less the penalties of overlong responses, [R] float32."""
    reward, limit = config.reward, config.rollout.max_new_tokens
    return torch.tensor(
        [
            given
            + overlong_penalty(length, limit, reward.overlong_fraction, reward.overlong_penalty)
            for given, length in zip(summary.rewards_R.tolist(), summary.written, strict=True)
        ],
        dtype=torch.float32,
    )
