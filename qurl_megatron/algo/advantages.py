"""How much better a response, or a token, was than expected.

Three ways to say what was expected. The other responses to the same prompt: one number per response
(``group_advantages``). The whole batch: discounted returns of each token, ``whitened`` over all
ranks. A critic: ``gae``. They are put together like this:

    grpo, dr_grpo, rloo      group_advantages, the same for every token of a response
    reinforce_pp             whitened(discounted_returns(reward at the last token - KL penalty))
    reinforce_pp_baseline    the same of reward - group mean; without discount and penalty all
                             tokens of a response are worth the same
    gae                      whitened advantages; the returns, which the critic learns, as they are

Shapes: P = prompts, G = responses per prompt, R = responses, N = tokens of all of them one response
after the other, L = tokens of the longest.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.algo.segments import padded, unpadded

AdvantageKind = Literal["grpo", "dr_grpo", "rloo"]

# Keeps the division defined; small against any spread of rewards that means something.
STD_EPSILON = 1e-6
# The same under the root of a variance.
VARIANCE_EPSILON = 1e-8


def group_advantages(rewards: Tensor, kind: AdvantageKind = "grpo") -> Tensor:
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

    The GRPO paper only says "std"; n - 1 is what verl computes, on which the paper's recipes
    (DeepScaleR, DAPO) run. The population deviation would give advantages larger by
    sqrt(G / (G - 1)).
    """
    return centred(rewards) / (rewards.std(dim=1, keepdim=True, correction=1) + STD_EPSILON)


def centred(rewards: Tensor) -> Tensor:
    """reward - mean: Dr.GRPO, which leaves easy and hard prompts at their own scale."""
    return rewards - rewards.mean(dim=1, keepdim=True)


def left_out(rewards: Tensor) -> Tensor:
    """reward - mean of the others: RLOO, whose baseline does not depend on the response itself."""
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
    return rewards - others


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


def discounted_returns(rewards: Tensor, lengths: Sequence[int] | Tensor, gamma: float) -> Tensor:
    """sum over k of gamma^k times the reward k tokens later in the same response, [N] -> [N]."""
    rewards_RL = padded(rewards.detach().double(), lengths)
    return unpadded(_accumulated(rewards_RL, gamma), lengths).to(rewards.dtype)


def gae(
    rewards: Tensor,
    values: Tensor,
    lengths: Sequence[int] | Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, Eq. 16).

    Args:
        rewards: reward of each token, [N].
        values: what the critic expected from before each token on, [N].
        lengths: tokens of each response, [R]; 0 is allowed.
        gamma: discount per token.
        lam: 1 gives the discounted return minus the value, 0 the one-step error.

    Returns:
        [N] advantages, and [N] returns (advantage + value) for the critic to learn, detached. After
        the last token nothing is expected any more, also where the length limit cut it off.
    """
    rewards_RL, values_RL = (padded(x.detach().double(), lengths) for x in (rewards, values))
    next_RL = torch.zeros_like(values_RL)
    next_RL[:, :-1] = values_RL[:, 1:]
    errors_RL = rewards_RL + gamma * next_RL - values_RL
    advantages = unpadded(_accumulated(errors_RL, gamma * lam), lengths)
    returns = advantages + values.detach()
    return advantages.to(values.dtype), returns.to(values.dtype)


def _accumulated(rows_RL: Tensor, factor: float) -> Tensor:
    """Each entry plus ``factor`` times what has been accumulated behind it.

    Padding is behind the tokens and 0, so nothing flows from it.
    """
    columns_LR = rows_RL.T.contiguous()
    for t in range(len(columns_LR) - 2, -1, -1):
        columns_LR[t].add_(columns_LR[t + 1], alpha=factor)
    return columns_LR.T


def whitened(
    values: Tensor, *, group: dist.ProcessGroup | None = None, centre: bool = True
) -> Tensor:
    """Values with mean 0 and deviation 1 over all tokens of all ranks, [N] -> [N], detached.

    Args:
        values: this rank's tokens; N may differ between ranks, and be 0.
        group: over which mean and variance are taken, in one all-reduce; None: these values alone.
        centre: False leaves the mean where it was.

    The variance is the unbiased one. A single token becomes 0, as do tokens all alike.
    """
    x = values.detach().double()
    sums = torch.stack([x.new_tensor(float(len(x))), x.sum(), x.square().sum()])
    if group is not None:
        dist.all_reduce(sums, group=group)
    count, total, squares = sums
    mean = total / count.clamp(min=1)
    variance = (squares - count * mean.square()).clamp(min=0) / (count - 1).clamp(min=1)
    scaled = (x - mean) / (variance + VARIANCE_EPSILON).sqrt()
    return (scaled if centre else scaled + mean).to(values.dtype)
