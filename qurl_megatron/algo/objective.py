"""The per-token objectives of the paper as pure functions of three policies' log-probs.

All of them are one clipped surrogate: a ratio, kept below an upper and above a lower bound, times a
weight that corrects for the quantized rollout policy. They differ in which policy the ratio is
taken against, in the weight, and in the upper bound; ``OBJECTIVES`` says how, a line each.

    behaviour  the quantized engine that sampled the tokens
    proximal   the full-precision actor before this update
    current    the actor being optimised; the only one that is differentiated

    rho = proximal / behaviour      C = cap, the largest weight
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ObjectiveKind = Literal["naive", "proximal", "decoupled", "tis", "acr"]

# exp(20) = 5e8: far outside every clip range, far inside float32.
MAX_LOG_RATIO = 20.0


def objective(
    current: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    kind: ObjectiveKind = "acr",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float = 2.0,
) -> Tensor:
    """Per-token objective J, to be maximised; same shape as the inputs.

    Args:
        current: log-probs of the actor being optimised.
        proximal: log-probs of the full-precision actor before this update.
        behaviour: log-probs the quantized engine reported while sampling.
        advantages: advantage of each token.
        kind: paper Eq. 3 (naive), Eq. 1 on quantized rollouts (proximal), Eq. 4 (decoupled),
            Eq. 5 (tis), Eq. 9 (acr).
        clip_low: the ratio stops paying below ``1 - clip_low`` where the advantage is negative.
        clip_high: and above ``1 + clip_high`` where it is positive; acr moves this bound.
        cap: C, the largest importance weight (tis, acr).
    """
    return objective_terms(
        current,
        proximal,
        behaviour,
        advantages,
        kind=kind,
        clip_low=clip_low,
        clip_high=clip_high,
        cap=cap,
    ).value


@dataclass(frozen=True)
class ObjectiveTerms:
    """The objective and what went into it, per token; all but ``value`` are detached."""

    value: Tensor  # J, differentiable
    ratio: Tensor  # current / the policy this kind compares with
    rho: Tensor  # proximal / behaviour
    weight: Tensor  # what the clipped surrogate is multiplied by
    clipped: Tensor  # bool: the clip stops this token's gradient
    truncated: Tensor  # bool: rho > cap
    acr_active: (
        Tensor  # bool: the upper bound is wider than 1 + clip_high and the advantage positive
    )
    acr_rescued: Tensor  # bool: of these, tokens that the bound of TIS would have clipped


def objective_terms(
    current: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    kind: ObjectiveKind = "acr",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float = 2.0,
) -> ObjectiveTerms:
    """``objective`` together with the facts per token that the trainer logs as fractions."""
    rule = OBJECTIVES[kind]
    rho = probability_ratio(proximal, behaviour).detach()
    ratio = probability_ratio(current, rule.compare_with(proximal, behaviour).detach())
    weight = rule.weight(rho, cap)
    upper = rule.upper_bound(rho, clip_high, cap)
    surrogate, clipped = clipped_surrogate(ratio, advantages, 1 - clip_low, upper)

    ratio = ratio.detach()
    active = (advantages > 0) & (upper > fixed_bound(rho, clip_high, cap))
    return ObjectiveTerms(
        value=weight * surrogate,
        ratio=ratio,
        rho=rho,
        weight=weight,
        clipped=clipped,
        truncated=rho > cap,
        acr_active=active,
        acr_rescued=active & (ratio > 1 + clip_high) & ~clipped,
    )


def probability_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``exp(numerator - denominator)`` of two log-probs, finite in value and gradient."""
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, lower: float | Tensor, upper: float | Tensor
) -> tuple[Tensor, Tensor]:
    """``min(ratio * A, clip(ratio, lower, upper) * A)``, and where the clip stops the gradient.

    Spelled out by the sign of A, because ``torch.minimum`` halves the gradient of every token whose
    ratio sits exactly on a bound.
    """
    too_high = (advantages > 0) & (ratio > upper)
    too_low = (advantages < 0) & (ratio < lower)
    bounded = torch.where(too_high, upper, torch.where(too_low, lower, ratio))
    return bounded * advantages, too_high | too_low


def unit_weight(rho: Tensor, cap: float) -> Tensor:
    return torch.ones_like(rho)


def importance_weight(rho: Tensor, cap: float) -> Tensor:
    """rho itself: unbiased, and as large as the policies are far apart."""
    return rho


def truncated_weight(rho: Tensor, cap: float) -> Tensor:
    """min(rho, C)."""
    return rho.clamp(max=cap)


def fixed_bound(rho: Tensor, clip_high: float, cap: float) -> Tensor:
    return torch.full_like(rho, 1 + clip_high)


def adaptive_bound(rho: Tensor, clip_high: float, cap: float) -> Tensor:
    """(1 + clip_high) / r, r = min(1, C / rho): wider by as much as the weight was truncated."""
    return (1 + clip_high) * (rho / cap).clamp(min=1.0)


def against_proximal(proximal: Tensor, behaviour: Tensor) -> Tensor:
    return proximal


def against_behaviour(proximal: Tensor, behaviour: Tensor) -> Tensor:
    return behaviour


@dataclass(frozen=True)
class Rule:
    """What one objective of the paper puts into the clipped surrogate."""

    compare_with: Callable[[Tensor, Tensor], Tensor]
    weight: Callable[[Tensor, float], Tensor]
    upper_bound: Callable[[Tensor, float, float], Tensor]


OBJECTIVES: dict[str, Rule] = {
    "naive": Rule(against_behaviour, unit_weight, fixed_bound),
    "proximal": Rule(against_proximal, unit_weight, fixed_bound),
    "decoupled": Rule(against_proximal, importance_weight, fixed_bound),
    "tis": Rule(against_proximal, truncated_weight, fixed_bound),
    "acr": Rule(against_proximal, truncated_weight, adaptive_bound),
}
