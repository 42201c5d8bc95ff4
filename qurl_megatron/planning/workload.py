"""What one step of a recipe asks for: how many responses, and how long they are.

Lengths are not known before a run. They are taken to fall exponentially, cut off at
``rollout.max_new_tokens``: P(length > x) = exp(-x / s) below it, with s such that the mean is
right. So many are short, few are long, and some reach the limit. A plan must not depend on a draw:
n responses have the n quantiles, and the longest one is as long as the limit allows.
"""

import math
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step's responses. Lengths in tokens."""

    prompts: int
    samples: int  # per prompt
    prompt: float  # mean length
    mean: float  # of a response
    longest: int  # a response may be
    minibatches: int
    epochs: int

    @property
    def responses(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens(self) -> float:
        """Prompts and responses that train, as a step lays them out."""
        return self.responses * (self.prompt + self.mean)

    def lengths(self, count: int) -> tuple[int, ...]:
        """Those of ``count`` responses, shortest first."""
        return _lengths(self.mean, self.longest, count)


@cache
def _lengths(mean: float, longest: int, count: int) -> tuple[int, ...]:
    scale = decay(mean, longest)
    # -log1p(-u) is the exponential distribution's quantile; the middle of each n-th part is taken.
    found = [
        min(longest, max(1, round(-scale * math.log1p(-(i + 0.5) / count))))
        if math.isfinite(scale)
        else longest
        for i in range(count)
    ]
    return (*found[:-1], longest)


@cache
def decay(mean: float, longest: int) -> float:
    """s of the distribution: the solution of mean = s (1 - exp(-longest / s)); infinite where all
    responses are as long as can be."""
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
    """The same in an order as mixed as chance would make it, yet always the same one."""
    count = len(lengths)
    golden = (math.sqrt(5) - 1) / 2
    return [lengths[i] for i in sorted(range(count), key=lambda i: (i + 1) * golden % 1)]
