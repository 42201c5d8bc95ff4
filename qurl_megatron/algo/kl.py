"""Schulman's estimators of KL(sampler || other) from the log-probs of sampled tokens.

As a number, averaged over tokens drawn from ``sampler``: k1 is unbiased but of either sign; k2 is
biased, by the third order of the gap, and never negative; k3 is unbiased, never negative and of
lower variance than k1 (joschu.net/blog/kl-approx.html).

As a loss, differentiated with ``sampler`` the current policy, it is the gradient that counts
(Tang and Munos 2025, arXiv:2506.09477). With g the gradient of log sampler of a token:

    k1   g                              its expectation is zero: as a loss it is noise
    k2   log(sampler / other) g         unbiased for the gradient of KL(sampler || other)
    k3   (1 - other / sampler) g        unbiased for that of KL(other || sampler), the other way
                                        round; the two agree while the policies are close

So k1 belongs in the reward, where log(sampler / other) multiplies g by way of the advantage, and
k2 or k3 in the loss. (Each speaks of one token given those before it; only the reward also
charges a token with the divergence that follows from it.)
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qurl_megatron.algo.ratios import MAX_LOG_RATIO


def k1(sampler: Tensor, other: Tensor) -> Tensor:
    """log(sampler / other) per token."""
    return (sampler - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k2(sampler: Tensor, other: Tensor) -> Tensor:
    """log(sampler / other)^2 / 2 per token."""
    return 0.5 * k1(sampler, other).square()


def k3(sampler: Tensor, other: Tensor) -> Tensor:
    """x - 1 - log x with x = other / sampler, per token."""
    log_x = -k1(sampler, other)
    # expm1, because near log x = 0 the subtraction of 1 would leave only rounding noise.
    return torch.expm1(log_x) - log_x


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_penalty(current: Tensor, reference: Tensor, kind: str, *, highest: float = 0.0) -> Tensor:
    """Return each token's penalty for its distance from the reference, to be averaged.

    Args:
        current: log-probs of the policy that pays; differentiated where it is.
        reference: log-probs of the reference policy.
        highest: where k3 ends, in value and gradient; 0 is off. It alone grows with the ratio: one
            token that the reference finds e^10 times likelier would have a gradient of -22,000.
    """
    estimate = ESTIMATORS[kind](current, reference)
    return estimate.clamp(max=highest) if kind == "k3" and highest else estimate
