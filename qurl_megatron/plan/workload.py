"""The work of one step: how many responses, and how long they are.

Lengths are not known before a run. They are taken to fall exponentially, cut off at
``rollout.max_new_tokens``: P(length > x) = exp(-x / s) below it, with s such that the mean is
right. So many are short, few are long, and some reach the limit. A plan must not depend on a draw:
n responses have the n quantiles, and the longest one is as long as the limit allows.
"""

import math
from dataclasses import dataclass
from functools import cache

from qurl_megatron.config import RunConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.plan.constants import Constants


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step's responses. Lengths in tokens."""

    prompts: int
    samples: int  # per prompt
    prompt: float  # mean length
    mean: float  # length of a response
    longest: int  # length that a response may have
    minibatches: int
    epochs: int

    @property
    def responses(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens(self) -> float:
        """Prompts and responses that train."""
        return self.responses * (self.prompt + self.mean)

    def lengths(self, count: int) -> tuple[int, ...]:
        """Return the lengths of ``count`` responses, shortest first."""
        return _lengths(self.mean, self.longest, count)


def workload(
    config: RunConfig, constants: Constants, mean: float | None, prompt: float | None
) -> Workload:
    """Return the work that a step of the recipe asks for.

    Args:
        mean, prompt: mean lengths of responses and prompts; None takes the constants' shares.

    Raises:
        ConfigError: one of them is beyond the recipe's limit.
    """
    longest, longest_prompt = config.rollout.max_new_tokens, config.data.max_prompt_tokens
    limits = (
        ("--mean-tokens", mean, "rollout.max_new_tokens", longest),
        ("--mean-prompt-tokens", prompt, "data.max_prompt_tokens", longest_prompt),
    )
    for option, value, key, limit in limits:
        if value is not None and not 0 < value <= limit:
            raise ConfigError(f"{option} {value:g} must lie between 1 and {key}={limit}")
    return Workload(
        prompts=config.data.prompts_per_step,
        samples=config.rollout.samples_per_prompt,
        prompt=prompt or constants.mean_prompt * longest_prompt,
        mean=mean or constants.mean_response * longest,
        longest=longest,
        minibatches=config.algo.minibatches,
        epochs=config.algo.epochs,
    )


@cache
def _lengths(mean: float, longest: int, count: int) -> tuple[int, ...]:
    scale = decay(mean, longest)
    if math.isinf(scale):
        return (longest,) * count
    lengths = []
    for i in range(count):
        # -log1p(-u) is the exponential distribution's quantile; u is the middle of the i-th part.
        length = round(-scale * math.log1p(-(i + 0.5) / count))
        lengths.append(min(longest, max(1, length)))
    return (*lengths[:-1], longest)


@cache
def decay(mean: float, longest: int) -> float:
    """Solve mean = s (1 - exp(-longest / s)) for s; infinite where all are as long as can be."""
    if mean >= longest:
        return math.inf
    low, high = mean, mean
    while high * -math.expm1(-longest / high) < mean * (1 - 1e-9) and high < 1e6 * longest:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if middle * -math.expm1(-longest / middle) < mean:
            low = middle
        else:
            high = middle
    return high


def in_turn(lengths: tuple[int, ...]) -> list[int]:
    """Return the lengths in an order as mixed as chance would make it, yet always the same."""
    count = len(lengths)
    golden = (math.sqrt(5) - 1) / 2
    return [lengths[i] for i in sorted(range(count), key=lambda i: (i + 1) * golden % 1)]
