"""What each response token is worth, once policies, reference and critic have scored the batch.

Every rank knows rewards and lengths of all responses of the step, but only the scores of its own
microbatches: what needs a whole group of responses, or the whole batch, is summed over the
data-parallel ranks. Pipeline stages before the last have no scores and need no advantages.

What an environment said between two turns of the policy is part of the transition from the last
token of the one to the first of the other: the critic's value of the latter is that of the state
with the environment's words read, and neither gamma nor lambda counts these words as steps.

Shapes: R = responses of the step, P x G = prompts and responses to each; n = tokens that the policy
wrote and r = responses of this rank's microbatches together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.algo import (
    AdvantageKind,
    at_last_token,
    discounted_returns,
    gae,
    group_advantages,
    kl_penalty,
    whitened,
)
from qurl_megatron.config import AlgoConfig, RunConfig
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.data.responses import Summary
from qurl_megatron.observe.metrics import Mean, Metric
from qurl_megatron.rewards import overlong_penalty
from qurl_megatron.runtime.megatron import Ranks


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
    penalty_n = torch.zeros(sum(len(b.owners) for b in batches), device=ranks.device)
    if algo.kl_coef and algo.kl_in == "reward":
        kl_n = torch.cat(
            [
                kl_penalty(b.proximal, b.reference, algo.kl_estimator, highest=algo.kl_max)
                for b in batches
            ]
        )
        penalty_n = algo.kl_coef * kl_n
        metrics["reference/kl"] = Mean(kl_n.double().sum().item(), float(len(kl_n)))
    known = _Known(
        rewards_R,
        group=config.rollout.samples_per_prompt,
        indices_r=torch.tensor(list(chain(*(b.indices for b in batches))), device=ranks.device),
        lengths_r=torch.tensor(list(chain(*(b.lengths for b in batches))), device=ranks.device),
        penalty_n=penalty_n,
        values_n=None if batches[0].values is None else torch.cat([b.values for b in batches]),
        data_group=ranks.data.group,
    )
    advantages_n, returns_n = ESTIMATES[algo.advantage](known, algo)
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
    """What the verifier said, less what an overlong response costs, [R] float32."""
    reward, limit = config.reward, config.rollout.max_new_tokens
    return torch.tensor(
        [
            given
            + overlong_penalty(length, limit, reward.overlong_fraction, reward.overlong_penalty)
            for given, length in zip(summary.rewards_R.tolist(), summary.written, strict=True)
        ],
        dtype=torch.float32,
    )


@dataclass(frozen=True)
class _Known:
    """What an advantage can be made of."""

    rewards_R: Tensor
    group: int  # G
    indices_r: Tensor  # which responses of the step this rank has
    lengths_r: Tensor
    penalty_n: Tensor  # KL penalty of each token, 0 where it is part of the loss
    values_n: Tensor | None
    data_group: dist.ProcessGroup

    def token_rewards(self, rewards_R: Tensor) -> Tensor:
        """The response's reward at its last token, less each token's penalty, [n]."""
        return at_last_token(rewards_R[self.indices_r], self.lengths_r) - self.penalty_n

    def penalised(self) -> Tensor:
        """Rewards less the penalties of whole responses, [R], the same on every rank."""
        owners_n = self.indices_r.repeat_interleave(self.lengths_r)
        taken_R = torch.zeros_like(self.rewards_R).index_add_(0, owners_n, self.penalty_n)
        dist.all_reduce(taken_R, group=self.data_group)
        return self.rewards_R - taken_R


Estimate = Callable[[_Known, AlgoConfig], tuple[Tensor, Tensor | None]]
"""(advantages [n], returns [n] for the critic or None)."""


def over_group(known: _Known, algo: AlgoConfig) -> tuple[Tensor, None]:
    """Each response against the others to its prompt; all its tokens alike."""
    groups_PG = known.penalised().view(-1, known.group)
    worth_R = group_advantages(groups_PG, cast(AdvantageKind, algo.advantage)).flatten()
    return worth_R[known.indices_r].repeat_interleave(known.lengths_r), None


def over_batch(known: _Known, algo: AlgoConfig) -> tuple[Tensor, None]:
    """Rewards still to come, whitened over the whole batch."""
    to_come_n = discounted_returns(
        known.token_rewards(known.rewards_R), known.lengths_r, gamma=algo.gamma
    )
    return whitened(to_come_n, group=known.data_group), None


def over_group_and_batch(known: _Known, algo: AlgoConfig) -> tuple[Tensor, None]:
    """The same with the group's mean as the baseline of the reward."""
    groups_PG = known.rewards_R.view(-1, known.group)
    centred_R = group_advantages(groups_PG, "dr_grpo").flatten()
    to_come_n = discounted_returns(
        known.token_rewards(centred_R), known.lengths_r, gamma=algo.gamma
    )
    return whitened(to_come_n, group=known.data_group), None


def against_critic(known: _Known, algo: AlgoConfig) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, whitened; the critic's targets are not."""
    assert known.values_n is not None, "a critic has scored the batch"
    advantages_n, returns_n = gae(
        known.token_rewards(known.rewards_R),
        known.values_n,
        known.lengths_r,
        gamma=algo.gamma,
        lam=algo.gae_lambda,
    )
    return whitened(advantages_n, group=known.data_group), returns_n


ESTIMATES: dict[str, Estimate] = {
    "grpo": over_group,
    "dr_grpo": over_group,
    "rloo": over_group,
    "reinforce_pp": over_batch,
    "reinforce_pp_baseline": over_group_and_batch,
    "gae": against_critic,
}
