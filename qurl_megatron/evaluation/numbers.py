"""What a run comes to, and what the seeds of a method come to together. Pure functions.

Shapes: N = steps at which a metric was measured.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qurl_megatron.observe.history import History

WINDOW = 5
"""Steps whose mean reward counts as the reward of the last of them; one bad batch is no
collapse."""

Series = tuple[np.ndarray, np.ndarray]
"""Steps and values, [N] each."""


@dataclass(frozen=True)
class Spread:
    """Several seeds' values of one number."""

    mean: float
    std: float | None  # of the sample, divided by n - 1; None for a single value
    low: float
    high: float
    values: tuple[float, ...]


def collapse_step(steps_N: np.ndarray, rewards_N: np.ndarray) -> int | None:
    """The first step from which the reward stays below half of its best until the run ends.

    The reward of a step is the mean over it and the ``WINDOW - 1`` steps before it; its best is the
    highest so far. None where the last step is at half of the best or more, and where the reward
    was never positive.
    """
    reward_N = np.array(
        [rewards_N[max(0, i + 1 - WINDOW) : i + 1].mean() for i in range(len(rewards_N))]
    )
    best_N = np.maximum.accumulate(reward_N)
    fallen_N = (best_N > 0) & (reward_N < 0.5 * best_N)
    if not len(fallen_N) or not fallen_N[-1]:
        return None
    standing = np.flatnonzero(~fallen_N)  # never empty: the first reward is its own best
    return int(steps_N[standing[-1] + 1])


def at_end(values_N: np.ndarray) -> float:
    """Mean over the last tenth of the steps; single batches are noisy."""
    return float(values_N[-max(1, len(values_N) // 10) :].mean())


def after_the_first(values_N: np.ndarray) -> float:
    """Median of all but the first step, which alone pays for caches and compilation."""
    return float(np.median(values_N[1:] if len(values_N) > 1 else values_N))


def over_steps(values_N: np.ndarray) -> float | None:
    """Standard deviation of the sample, divided by N - 1; None for a single step."""
    return float(values_N.std(ddof=1)) if len(values_N) > 1 else None


TRAINED = "accuracy_trained"
"""Of the last checkpoint itself, unquantized, which no metric of the run tells."""

FINALS: dict[str, tuple[str, Callable[[np.ndarray], float | None]]] = {
    "accuracy_before": ("eval/accuracy", lambda values_N: values_N[0]),
    "accuracy": ("eval/accuracy", lambda values_N: values_N[-1]),
    "accuracy_best": ("eval/accuracy", np.max),
    "reward": ("reward/mean", at_end),
    "kl": ("rollout/kl_k3", at_end),
    "kl_mean": ("rollout/kl_k3", np.mean),
    "kl_largest": ("rollout/kl_k3", np.max),
    "rho_max": ("rollout/rho_max", np.max),
    "clip_fraction": ("policy/clip_fraction", np.mean),
    "acr_active": ("acr/active_fraction", np.mean),
    "acr_rescued": ("acr/rescued_fraction", np.mean),
    "code_flip_rate": ("quant/code_flip_rate", np.mean),
    "weight_update": ("quant/weight_update", np.mean),
    "weight_error": ("quant/weight_error", np.mean),
    "update_passed": ("quant/update_passed", np.mean),
    "update_passed_std": ("quant/update_passed", over_steps),
    "seconds": ("time/step", np.sum),
    "step_seconds": ("time/step", after_the_first),
}
"""What one run comes to: a metric, and what is taken of its values over the steps."""


def finals(history: History, trained: float | None = None) -> dict[str, float | None]:
    """``FINALS`` and the step of collapse of one run; None for what it did not measure.

    Args:
        trained: accuracy of its last checkpoint, unquantized.
    """
    final_values: dict[str, float | None] = {TRAINED: trained}
    for name, (metric, reduce) in FINALS.items():
        value = reduce(history.series(metric)[1]) if metric in history else None
        final_values[name] = None if value is None else float(value)
    rewards = history.series("reward/mean") if "reward/mean" in history else None
    final_values["collapse_step"] = collapse_step(*rewards) if rewards else None
    return final_values


def spread(values: Sequence[float | None]) -> Spread | None:
    """Over the seeds that measured it; None where none did."""
    measured = tuple(value for value in values if value is not None)
    if not measured:
        return None
    mean = math.fsum(measured) / len(measured)
    std = None
    if len(measured) > 1:
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in measured) / (len(measured) - 1))
    return Spread(mean, std, min(measured), max(measured), measured)


def aggregate(runs: Sequence[Mapping[str, float | None]]) -> dict[str, Spread | None]:
    """The spread of each number over the runs of one method."""
    return {
        name: spread([run[name] for run in runs]) for name in (TRAINED, *FINALS, "collapse_step")
    }


def band(curves: Sequence[Series]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, and mean, lowest and highest value over the curves that have the step; [N] each."""
    at: dict[int, list[float]] = {}
    for steps_N, values_N in curves:
        for step, value in zip(steps_N.tolist(), values_N.tolist(), strict=True):
            at.setdefault(step, []).append(value)
    steps = sorted(at)
    values = [at[step] for step in steps]
    mean, low, high = (np.array([take(some) for some in values]) for take in (np.mean, min, max))
    return np.array(steps), mean, low, high
