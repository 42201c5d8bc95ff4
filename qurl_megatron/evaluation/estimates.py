"""Estimates of accuracy and how far they can be trusted; pure functions of rewards.

A benchmark's problems are a draw from all that could have been asked, and the responses to each are
a draw from the policy. The bootstrap resamples problems, each with all of its responses: the means
of the problems vary by both draws, so the interval covers both. (Resampling the responses of each
resampled problem as well would count their share twice: Davison and Hinkley 1997, section 3.8.)

Between two policies on the same problems the problems cancel out; what is left is the draw of
responses, and that is ``sampling_error``.

Shapes: P = problems, K = responses to each, D = draws of the bootstrap.
"""

import math
from collections.abc import Sequence

import numpy as np

DRAWS = 10_000
LEVEL = 0.95
_AT_ONCE = 1 << 22  # indices drawn at a time: 32 MB


def resampled_means(mean_P: np.ndarray, seed: Sequence[int], draws: int = DRAWS) -> np.ndarray:
    """[D] means over P problems drawn with replacement.

    Args:
        seed: whole numbers of 0 or more; another one gives independent draws.
    """
    generator = np.random.default_rng(seed)
    count = len(mean_P)
    rows = max(1, _AT_ONCE // count)
    return np.concatenate(
        [
            mean_P[generator.integers(count, size=(min(rows, draws - start), count))].mean(axis=1)
            for start in range(0, draws, rows)
        ]
    )


def interval(resampled_D: np.ndarray, level: float = LEVEL) -> tuple[float, float] | None:
    """The percentile interval of resampled means; None where they do not vary.

    All problems alike, e.g. none right, is no evidence that accuracy is exactly that: there a
    bootstrap has nothing to say.
    """
    if np.ptp(resampled_D) == 0:
        return None
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(resampled_D, [tail, 100 - tail])
    return float(low), float(high)


def sampling_error(reward_PK: np.ndarray) -> float:
    """Standard error of the mean over the draw of responses alone, on these very problems.

    sqrt(sum_p s_p^2 / K) / P with the unbiased variance s_p^2 of problem p; nan for K = 1.
    """
    problems, responses = reward_PK.shape
    if responses < 2:
        return math.nan
    return float(np.sqrt(reward_PK.var(axis=1, ddof=1).sum() / responses) / problems)


def pass_at(right_P: Sequence[int], responses: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k responses is right, as a mean over problems.

    1 - C(n - c, k) / C(n, k) for c right ones of n (Chen et al. 2021, arXiv:2107.03374, Eq. 1).

    Args:
        right_P: right responses to each problem.
        responses: n, to each.
    """
    all_sets = math.comb(responses, k)
    failing = [math.comb(responses - right, k) / all_sets for right in right_P]
    return 1 - sum(failing) / len(failing)
