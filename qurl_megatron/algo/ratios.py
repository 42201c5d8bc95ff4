"""Probability ratios of two policies, of tokens or of whole responses, finite whatever goes in.

A log-ratio is bounded after it has been summed over a response, not before: terms of either sign
may cancel.

Importance weights correct for wrong sampling probabilities; a response that the other policy would
hardly have begun, or that went through one impossible token, is better dropped. The criteria are
those of Liu et al. 2025, "When Speed Kills Stability" (richardli.xyz/rl-collapse).

Shapes: N = response tokens of a microbatch, R = its responses; ``owners`` [N] says which response
a token belongs to. Where only single tokens are compared, any shape will do.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qurl_megatron.algo.segments import mean_per_response, sum_per_response

# exp(20) = 5e8: far outside every clip range, far inside float32.
MAX_LOG_RATIO = 20.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """``exp``, finite in value and gradient; the gradient ends where the bound begins."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def response_sum(log_rho: Tensor, owners: Tensor, responses: int) -> Tensor:
    return sum_per_response(log_rho, owners, responses)[owners].to(log_rho.dtype)


def response_mean(log_rho: Tensor, owners: Tensor, responses: int) -> Tensor:
    return mean_per_response(log_rho, owners, responses)[owners].to(log_rho.dtype)


LEVELS: dict[str, Callable[[Tensor, Any, Any], Tensor]] = {  # owners and R, or None
    "token": lambda log_rho, owners, responses: log_rho,
    "sequence": response_sum,
    "geometric": response_mean,
}
"""The logarithm of each token's rho: its own, or its response's sum or mean."""


def sequence_log_ratio(current: Tensor, other: Tensor, owners: Tensor, responses: int) -> Tensor:
    """log s_i, the mean log-ratio of a token's response: the ratio that GSPO clips.

    Each token gets its response's value, but the gradient of its own log-prob alone: GSPO's token
    form sg(s_i) current / sg(current), arXiv:2507.18071, Sec. 4.3.
    """
    # Averaged over the response this has the value and the gradient of s_i, as all its tokens have
    # one advantage and are clipped together. But the mean over the response enters as a number, so
    # no reduction is differentiated: autograd would send the gradient of every token through all
    # tokens of its response, on whichever rank they are.
    mean = response_mean((current - other).detach(), owners, responses)
    return mean + (current - current.detach())


@dataclass(frozen=True)
class Ratio:
    """The ratio that the surrogate clips."""

    log_ratio: Callable[[Tensor, Tensor, Any, Any], Tensor]  # owners and R, or None
    level: str  # of the rho on the same scale


RATIOS: dict[str, Ratio] = {
    "token": Ratio(lambda current, other, owners, responses: current - other, level="token"),
    "sequence": Ratio(sequence_log_ratio, level="geometric"),
}


def kept(
    proximal: Tensor,
    behaviour: Tensor,
    owners: Tensor,
    responses: int,
    *,
    low: float = 0.0,
    high: float = 0.0,
    veto: float = 0.0,
) -> Tensor:
    """Return which tokens belong to responses that stay in the loss, [N] bool.

    Args:
        proximal: log-probs of the full-precision policy before this update, [N].
        behaviour: log-probs the quantized engine reported while sampling, [N].
        owners: response of each token, [N] int64.
        responses: how many there are.
        low: smallest geometric mean of rho = proximal / behaviour over a response; 0 is off.
        high: largest; 0 is off.
        veto: smallest rho of any of its tokens; 0 is off.
    """
    # In logarithms, and unbounded: a veto of 1e-10 is beyond where ratios are cut off.
    log_rho = (proximal - behaviour).detach().double()
    mean_R = mean_per_response(log_rho, owners, responses)
    vetoed_R = sum_per_response(log_rho < _log(veto, -math.inf), owners, responses) > 0
    keep_R = (mean_R >= _log(low, -math.inf)) & (mean_R <= _log(high, math.inf)) & ~vetoed_R
    return keep_R[owners]


def _log(threshold: float, off: float) -> float:
    return math.log(threshold) if threshold else off
