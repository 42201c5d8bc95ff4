"""Schulman's estimators of KL(sampler || other) from the log-probs of sampled tokens.

Their mean over tokens drawn from ``sampler`` is the divergence: k1 without bias but of either sign,
k3 never negative and of lower variance. Both are differentiable; the penalty that keeps the actor
near the reference is ``k3(current, reference)``.
"""

import torch
from torch import Tensor

from qurl_megatron.algo.objective import MAX_LOG_RATIO


def k1(sampler: Tensor, other: Tensor) -> Tensor:
    """log(sampler / other) per token."""
    return (sampler - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3(sampler: Tensor, other: Tensor) -> Tensor:
    """x - 1 - log x with x = other / sampler, per token."""
    log_x = (other - sampler).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1, because near log x = 0 the subtraction of 1 would leave only rounding noise.
    return torch.expm1(log_x) - log_x
