"""Responses on which the quantized and the full-precision policy disagree too much to learn from.

Importance weights correct for wrong sampling probabilities; a response that the
other policy would hardly have begun, or that went through one impossible token, is better dropped.
The criteria are those of Liu et al. 2025, "When Speed Kills Stability" (richardli.xyz/rl-collapse).
"""

import math

from torch import Tensor

from qurl_megatron.algo.segments import mean_per_response, sum_per_response


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
    """Which tokens belong to responses that stay in the loss, [N] bool.

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
