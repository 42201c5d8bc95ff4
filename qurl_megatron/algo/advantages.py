"""How much better a response, or a token, was than expected.

The expectation comes from one of three sources. The other responses to the same prompt: one number
per response (``group_advantages``). The whole batch: discounted returns of each token, ``whitened``
over all ranks. A critic: ``gae``. ``ESTIMATES`` says how they are put together.

Shapes: P = prompts, G = responses per prompt, R = responses of the step, on whatever rank; r =
responses of this rank; N = tokens of these one response after the other, L = tokens of the longest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# Keeps the division defined; small against any spread of rewards that means something.
STD_EPSILON = 1e-6
# The same under the root of a variance.
VARIANCE_EPSILON = 1e-8


def group_advantages(rewards: Tensor, kind: str = "grpo") -> Tensor:
    """Advantage of every response over its group, [P, G] -> [P, G].

    A group whose rewards are all equal (a group of one, too) says nothing about which response is
    better and gets exactly 0, not the rounding noise of its mean divided by the epsilon.
    """
    assert rewards.ndim == 2, f"rewards must be [prompts, group], got {tuple(rewards.shape)}"
    if rewards.shape[1] < 2 or len(rewards) == 0:
        return torch.zeros_like(rewards)
    equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    return ADVANTAGES[kind](rewards).masked_fill(equal, 0.0)


def standardised(rewards: Tensor) -> Tensor:
    """(reward - mean) / (std + 1e-6) with the sample deviation (n - 1).

    The GRPO paper only says "std"; verl, on which the paper's recipes (DeepScaleR, DAPO) run,
    computes n - 1. The population deviation would give advantages larger by
    sqrt(G / (G - 1)).
    """
    return centred(rewards) / (rewards.std(dim=1, keepdim=True, correction=1) + STD_EPSILON)


def centred(rewards: Tensor) -> Tensor:
    """reward - mean: Dr.GRPO, which leaves easy and hard prompts at their own scale."""
    return rewards - rewards.mean(dim=1, keepdim=True)


def left_out(rewards: Tensor) -> Tensor:
    """reward - mean of the others: RLOO, whose baseline does not depend on the response itself."""
    mean_of_others = (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
    return rewards - mean_of_others


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "grpo": standardised,
    "dr_grpo": centred,
    "rloo": left_out,
}


def at_last_token(rewards: Tensor, lengths: Sequence[int] | Tensor) -> Tensor:
    """The reward of a response at its last token, 0 at the others, [R] -> [N].

    A response without tokens has no place for its reward and loses it.
    """
    lengths_R = torch.as_tensor(lengths, dtype=torch.int64, device=rewards.device)
    ends_R = lengths_R.cumsum(0)
    values_N = rewards.new_zeros(int(lengths_R.sum()))
    some_R = lengths_R > 0
    values_N[ends_R[some_R] - 1] = rewards[some_R]
    return values_N


def discounted_returns(rewards: Tensor, lengths: Sequence[int], gamma: float) -> Tensor:
    """sum over k of gamma^k times the reward k tokens later in the same response, [N] -> [N]."""
    return _accumulated(_columns(rewards, lengths), lengths, gamma).to(rewards.dtype)


def gae(
    rewards: Tensor, values: Tensor, lengths: Sequence[int], *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, Eq. 16).

    Args:
        rewards: reward of each token, [N].
        values: the critic's expected return before each token, [N].
        lengths: tokens of each response, [R]; 0 is allowed.
        gamma: discount per token.
        lam: 1 gives the discounted return minus the value, 0 the one-step error.

    Returns:
        [N] advantages, and [N] returns (advantage + value) for the critic to learn, detached. After
        the last token nothing is expected any more, also where the length limit cut it off.
    """
    rewards_LR, values_LR = _columns(rewards, lengths), _columns(values, lengths)
    next_LR = torch.zeros_like(values_LR)
    next_LR[:-1] = values_LR[1:]
    errors_LR = rewards_LR + gamma * next_LR - values_LR
    advantages = _accumulated(errors_LR, lengths, gamma * lam)
    returns = advantages + values.detach()
    return advantages.to(values.dtype), returns.to(values.dtype)


def value_loss(
    values: Tensor, before: Tensor, returns: Tensor, *, clip: float
) -> tuple[Tensor, Tensor]:
    """The critic's ``max((v - R)^2, (clip(v, before - clip, before + clip) - R)^2) / 2`` per token.

    The larger of the two is the pessimistic one: a value that has moved further than ``clip``
    towards its return gains nothing more, one that has moved away from it is still called back.

    Args:
        values: predictions of the critic being optimised, [N].
        before: its predictions before this update, [N].
        returns: their targets, [N].
        clip: how far a value may move from ``before``; 0 does not clip.

    Returns:
        [N] loss, to be minimised, and [N] bool: the clip stops this token's gradient.
    """
    before, returns = before.detach(), returns.detach()
    free = (values - returns).square()
    if not clip:
        return 0.5 * free, torch.zeros_like(free, dtype=torch.bool)
    bounded = (values.detach().clamp(before - clip, before + clip) - returns).square()
    clipped = bounded > free
    return 0.5 * torch.where(clipped, bounded, free), clipped


def _columns(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Lay out a column per response, filled up with zeros, [N] -> [L, R] float64, detached."""
    return pad_sequence(values.detach().double().split(lengths))


def _accumulated(columns_LR: Tensor, lengths: Sequence[int], factor: float) -> Tensor:
    """Return each token's entry plus ``factor`` times the sum accumulated behind it, [N].

    Padding is behind the tokens and 0, so nothing flows from it. The columns are overwritten.
    """
    for t in range(len(columns_LR) - 2, -1, -1):
        columns_LR[t].add_(columns_LR[t + 1], alpha=factor)
    responses = zip(columns_LR.T, lengths, strict=True)
    return torch.cat([column_L[:length] for column_L, length in responses])


def whitened(values: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Values with mean 0 and deviation 1 over all tokens of all ranks, [N] -> [N], detached.

    Args:
        values: this rank's tokens; N may differ between ranks, and be 0.
        group: over which mean and variance are taken, in one all-reduce; None: these values alone.

    The variance is the unbiased one. A single token becomes 0, as do tokens all alike.
    """
    x = values.detach().double()
    sums = torch.stack([x.new_tensor(float(len(x))), x.sum(), x.square().sum()])
    if group is not None:
        dist.all_reduce(sums, group=group)
    count, total, squares = sums
    mean = total / count.clamp(min=1)
    variance = (squares - count * mean.square()).clamp(min=0) / (count - 1).clamp(min=1)
    return ((x - mean) / (variance + VARIANCE_EPSILON).sqrt()).to(values.dtype)


@dataclass(frozen=True, kw_only=True)
class BatchFacts:
    """The inputs of an advantage."""

    rewards_R: Tensor  # of all responses of the step, prompt-major; the same on every rank
    group_size: int  # G
    indices_r: Tensor  # int64: which of the step's responses are this rank's
    lengths_r: Tensor  # int64: their tokens; 0 is allowed
    penalty_N: Tensor  # taken off each token's reward (KL)
    values_N: Tensor | None = None  # a critic's expected return before each token; for gae
    gamma: float = 1.0  # discount per token
    lam: float = 1.0  # gae's lambda
    group: dist.ProcessGroup | None = None  # ranks that have the other responses; None: no one

    def token_rewards(self, rewards_R: Tensor) -> Tensor:
        """Return the response's reward at its last token, less each token's penalty, [N]."""
        return at_last_token(rewards_R[self.indices_r], self.lengths_r) - self.penalty_N

    def penalised(self) -> Tensor:
        """Return rewards less the penalties of whole responses, [R], the same on every rank."""
        owners_N = self.indices_r.repeat_interleave(self.lengths_r)
        taken_R = torch.zeros_like(self.rewards_R).index_add_(0, owners_N, self.penalty_N)
        if self.group is not None:
            dist.all_reduce(taken_R, group=self.group)
        return self.rewards_R - taken_R

    def whitened_returns(self, rewards_R: Tensor) -> Tensor:
        """Return each token's rewards still to come, whitened over the whole batch, [N]."""
        rewards_N, lengths = self.token_rewards(rewards_R), self.lengths_r.tolist()
        return whitened(discounted_returns(rewards_N, lengths, self.gamma), group=self.group)


def over_group(kind: str, facts: BatchFacts) -> tuple[Tensor, None]:
    """Each response against the others to its prompt; all its tokens alike."""
    groups_PG = facts.penalised().view(-1, facts.group_size)
    worth_R = group_advantages(groups_PG, kind).flatten()
    return worth_R[facts.indices_r].repeat_interleave(facts.lengths_r), None


def over_batch(facts: BatchFacts) -> tuple[Tensor, None]:
    """Rewards still to come, whitened over the whole batch."""
    return facts.whitened_returns(facts.rewards_R), None


def over_group_and_batch(facts: BatchFacts) -> tuple[Tensor, None]:
    """The same with the group's mean as the baseline of the reward. Without discount and penalty
    all tokens of a response are worth the same."""
    groups_PG = facts.rewards_R.view(-1, facts.group_size)
    return facts.whitened_returns(group_advantages(groups_PG, "dr_grpo").flatten()), None


def against_critic(facts: BatchFacts) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, whitened; the critic's targets are not."""
    assert facts.values_N is not None, "there is a critic"
    advantages_N, returns_N = gae(
        facts.token_rewards(facts.rewards_R),
        facts.values_N,
        facts.lengths_r.tolist(),
        gamma=facts.gamma,
        lam=facts.lam,
    )
    return whitened(advantages_N, group=facts.group), returns_N


Estimate = Callable[[BatchFacts], tuple[Tensor, Tensor | None]]
"""Returns the advantages of this rank's tokens, [N]; and for gae the returns that the critic is to
learn, [N], else None."""

ESTIMATES: dict[str, Estimate] = {
    "grpo": partial(over_group, "grpo"),
    "dr_grpo": partial(over_group, "dr_grpo"),
    "rloo": partial(over_group, "rloo"),
    "reinforce_pp": over_batch,
    "reinforce_pp_baseline": over_group_and_batch,
    "gae": against_critic,
}
