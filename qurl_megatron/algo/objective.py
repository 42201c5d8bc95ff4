"""The per-token objectives as pure functions of three policies' log-probs.

All of them are one surrogate: a ratio, kept below an upper and above a lower bound, times a weight
that corrects for the quantized rollout policy. They differ in which policy the ratio is taken
against, in the weight, and in the upper bound; ``OBJECTIVES`` says how, a line each.
``SURROGATES`` says how the bounded ratio is used; ``ratios`` computes the ratios.

    behaviour  the quantized engine that sampled the tokens
    proximal   the full-precision actor before this update
    current    the actor being optimised; the only one that is differentiated

    rho = proximal / behaviour      C = cap, the largest weight

Shapes: N = response tokens of a microbatch, R = its responses.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from qurl_megatron.algo.ratios import LEVELS, RATIOS, bounded_exp


@dataclass(frozen=True)
class Limits:
    """The numbers that weights and bounds are made with, each under the name of its setting.

    A formula with a number of its own adds the number here, the setting to ``config``, and nothing
    between the two: every formula below gets all of them.
    """

    clip_low: float = 0.2
    """The ratio stops paying below ``1 - clip_low`` where the advantage is negative,"""

    clip_high: float = 0.2
    """and above ``1 + clip_high`` where it is positive; acr moves this bound, there."""

    cap: float = 2.0
    """C, the largest importance weight (tis, acr)."""

    dual_clip: float = 0.0
    """Where the advantage is negative, the surrogate stays at or above ``dual_clip * advantage``,
    and a token beyond has no gradient (arXiv:1912.09729); 0 is off."""

    band_low: float = 0.5
    band_high: float = 5.0
    """rho outside of the band gets weight 0 (icepop)."""

    @classmethod
    def of(cls, algo: object, correction: object) -> "Limits":
        """Take each number from the section of settings that has it."""
        settings = {**vars(algo), **vars(correction)}
        return cls(*(settings[field.name] for field in fields(cls)))


def objective(
    current: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    kind: str = "acr",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap: float = 2.0,
) -> Tensor:
    """Per-token objective J of the paper, to be maximised; same shape as the inputs.

    Arguments as in ``objective_terms``, which has the other ratios, surrogates and numbers.
    """
    limits = Limits(clip_low=clip_low, clip_high=clip_high, cap=cap)
    return objective_terms(current, proximal, behaviour, advantages, kind=kind, limits=limits).value


@dataclass(frozen=True)
class ObjectiveTerms:
    """The objective and its parts, per token; all but ``value`` are detached.

    A token that is not kept counts as one without mismatch: ratio 1, nothing clipped; its weight
    is 0.
    """

    value: Tensor  # J, differentiable
    ratio: Tensor  # current / the policy this kind compares with
    weight: Tensor  # factor of the surrogate
    clipped: Tensor  # bool: the ratio is beyond a bound that counts; clip: no gradient
    dual_clipped: Tensor  # bool: the dual clip stops this token's gradient
    banded: Tensor  # bool: rho is outside the band, and the weight 0 (icepop)
    acr_active: Tensor  # bool: A > 0, and the upper bound is wider than 1 + clip_high
    acr_rescued: Tensor  # bool: of these, tokens that the bound of TIS would have clipped
    gradient: Tensor  # |w R A|, a token's pull on log current (clip); 0 beyond a bound


def objective_terms(
    current: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    kind: str = "acr",
    limits: Limits,
    level: str = "token",
    ratio: str = "token",
    owners: Tensor | None = None,
    responses: int | None = None,
    surrogate: str = "clip",
    keep: Tensor | None = None,
) -> ObjectiveTerms:
    """The objective, and the facts per token that the trainer logs as fractions.

    Args:
        current: log-probs of the actor being optimised, [N] (any shape, unless ``owners`` is used).
        proximal: log-probs of the full-precision actor before this update.
        behaviour: log-probs the quantized engine reported while sampling.
        advantages: advantage of each token.
        kind: paper Eq. 3 (naive), Eq. 1 on quantized rollouts (proximal), Eq. 4 (decoupled),
            Eq. 5 (tis), Eq. 9 (acr), or IcePop (arXiv:2510.18855).
        level: source of the weight: rho of each token, the product over its response, or its
            geometric mean.
        ratio: the clipped ratio: each token's, or its response's geometric mean (GSPO,
            arXiv:2507.18071). acr raises the bound by the rho on this scale, whatever ``level``.
        owners: response of each token, [N] int64; needed unless level and ratio are token.
        responses: R, how many there are.
        surrogate: clip: PPO's; cispo: the bounded ratio, whatever the sign of the advantage, as a
            constant factor of log current (arXiv:2506.13585, Eq. 4).
        keep: [N] bool, alike for all tokens of a response; without it a token gets value 0 and
            gradient 0, whatever its log-probs are.
    """
    rule, form, compare = OBJECTIVES[kind], SURROGATES[surrogate], RATIOS[ratio]
    if keep is not None:
        # Before any exp and any sum over a response: 0 * inf is nan, in the gradient too.
        current, proximal, behaviour, advantages = (
            torch.where(keep, x, 0.0) for x in (current, proximal, behaviour, advantages)
        )
    log_rho = (proximal - behaviour).detach()
    rho = bounded_exp(LEVELS[level](log_rho, owners, responses))
    # A bound is on the scale of the ratio that it bounds.
    bound_rho = bounded_exp(LEVELS[compare.level](log_rho, owners, responses))
    other = {"proximal": proximal, "behaviour": behaviour}[rule.against].detach()
    quotient = bounded_exp(compare.log_ratio(current, other, owners, responses))

    weight = in_band = rule.weight(rho, limits)
    if keep is not None:
        weight = torch.where(keep, weight, 0.0)

    # Raised for good tokens alone: cispo bounds bad ones from above as well, and there a wider
    # bound would rescue nothing but let one token cost (1 + clip_high) rho.
    fixed = fixed_bound(rho, limits)
    upper = torch.where(advantages > 0, rule.upper_bound(bound_rho, limits), fixed)
    above = form.bounded_above(advantages)
    too_high = above & (quotient > upper)
    lower = 1 - limits.clip_low
    too_low = form.bounded_below(advantages) & (quotient < lower)
    bounded = torch.where(too_high, upper, torch.where(too_low, lower, quotient))
    paid, dual_clipped = dual_clipped_value(
        form.value(bounded, current, advantages), advantages, limits
    )
    pull = (weight * quotient * advantages).detach().abs()
    return ObjectiveTerms(
        value=weight * paid,
        ratio=quotient.detach(),
        weight=weight,
        clipped=too_high | too_low,
        dual_clipped=dual_clipped,
        banded=in_band == 0,
        acr_active=above & (upper > fixed),
        acr_rescued=above & (quotient > fixed) & ~too_high,
        gradient=torch.where(too_high | too_low | dual_clipped, 0.0, pull),
    )


def unit_weight(rho: Tensor, limits: Limits) -> Tensor:
    return torch.ones_like(rho)


def untruncated_weight(rho: Tensor, limits: Limits) -> Tensor:
    """rho itself: unbiased, and as large as the policies are far apart."""
    return rho


def truncated_weight(rho: Tensor, limits: Limits) -> Tensor:
    """min(rho, C)."""
    return rho.clamp(max=limits.cap)


def masked_weight(rho: Tensor, limits: Limits) -> Tensor:
    """rho inside the band, 0 outside."""
    inside = (rho >= limits.band_low) & (rho <= limits.band_high)
    return torch.where(inside, rho, 0.0)


def fixed_bound(rho: Tensor, limits: Limits) -> Tensor:
    return torch.full_like(rho, 1 + limits.clip_high)


def adaptive_bound(rho: Tensor, limits: Limits) -> Tensor:
    """(1 + clip_high) / r, r = min(1, C / rho): wider by as much as the weight was truncated.

    Times a weight of the same rho it is (1 + clip_high) rho, without an end.
    """
    return (1 + limits.clip_high) * (rho / limits.cap).clamp(min=1.0)


@dataclass(frozen=True)
class Rule:
    """The inputs that one objective gives the surrogate."""

    against: Literal["proximal", "behaviour"]
    weight: Callable[[Tensor, Limits], Tensor]
    upper_bound: Callable[[Tensor, Limits], Tensor]


OBJECTIVES: dict[str, Rule] = {
    "naive": Rule("behaviour", unit_weight, fixed_bound),
    "proximal": Rule("proximal", unit_weight, fixed_bound),
    "decoupled": Rule("proximal", untruncated_weight, fixed_bound),
    "tis": Rule("proximal", truncated_weight, fixed_bound),
    "acr": Rule("proximal", truncated_weight, adaptive_bound),
    "icepop": Rule("proximal", masked_weight, fixed_bound),
}


def ratio_times_advantage(bounded: Tensor, current: Tensor, advantages: Tensor) -> Tensor:
    return bounded * advantages


def weighted_log_prob(bounded: Tensor, current: Tensor, advantages: Tensor) -> Tensor:
    """sg(ratio) A log current: every token keeps a gradient, with a bounded factor."""
    return bounded.detach() * advantages * current


def dual_clipped_value(value: Tensor, advantages: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """``max(value, dual_clip * A)`` where A < 0, and where that stops the gradient.

    A token that has become likely although its advantage is negative would otherwise pay without
    end. (cispo's value is positive there, and its factor bounded already: nothing happens.)
    """
    floor = limits.dual_clip * advantages
    below = (advantages < 0) & (value.detach() < floor) & bool(limits.dual_clip)
    return torch.where(below, floor, value), below


@dataclass(frozen=True)
class Surrogate:
    """Where the bounds count, by the sign of the advantage, and how the bounded ratio is used.

    ``min(R A, clip(R, lower, upper) A)`` is R A bounded above where A > 0 and below where A < 0.
    Spelled out like this because ``torch.minimum`` halves the gradient of every token whose ratio
    sits exactly on a bound.
    """

    bounded_above: Callable[[Tensor], Tensor]
    bounded_below: Callable[[Tensor], Tensor]
    value: Callable[[Tensor, Tensor, Tensor], Tensor]  # bounded ratio, current, advantages


SURROGATES: dict[str, Surrogate] = {
    "clip": Surrogate(lambda A: A > 0, lambda A: A < 0, ratio_times_advantage),
    "cispo": Surrogate(lambda A: A != 0, lambda A: A != 0, weighted_log_prob),
}
