"""Advantages without a critic: a response is compared with the others to the same prompt.

Shapes: P = prompts, G = responses per prompt.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

AdvantageKind = Literal["grpo", "dr_grpo"]

# Keeps the division defined; small against any spread of rewards that means something.
STD_EPSILON = 1e-6


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


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {"grpo": standardised, "dr_grpo": centred}
