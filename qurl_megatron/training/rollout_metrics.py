"""Metrics of one step's responses: pure functions of graded samples."""

import math
from collections import Counter
from collections.abc import Sequence

from qurl_megatron.config import RewardConfig
from qurl_megatron.observe.metrics import Max, Mean, Metric, Sum
from qurl_megatron.rewards import overlong_penalty
from qurl_megatron.types import Sample

ENVIRONMENT_CAUSES = ("timeouts", "crashes", "exceptions", "invalid")


def sample_metrics(samples: Sequence[Sample], *, newest: int) -> dict[str, Metric]:
    """Return metrics of lengths and versions; ``newest`` is the version they should come from."""
    tokens = sum(sample.written_tokens for sample in samples)
    oldest = min((v for sample in samples for v, _ in sample.versions), default=newest)
    return {
        "sync/version": Max(newest),
        "sync/staleness": Max(newest - oldest),
        "response/length": Mean(tokens, len(samples)),
        "response/truncated": Mean(sum(sample.truncated for sample in samples), len(samples)),
    }


def reward_metrics(samples: Sequence[Sample]) -> dict[str, Metric]:
    """Return mean and spread of the verifier's rewards; nothing where there are no samples."""
    if not samples:
        return {}
    rewards = [sample.reward for sample in samples]
    mean = sum(rewards) / len(rewards)
    return {
        "reward/mean": Mean(sum(rewards), len(rewards)),
        "reward/std": Max(math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))),
    }


def conversation_metrics(samples: Sequence[Sample]) -> dict[str, Metric]:
    """Return the number of turns, the environment's tokens, and its failures by cause."""
    count = len(samples)
    failures = Counter(sample.failure.cause for sample in samples if sample.failure)
    environment_tokens = sum(len(sample.response_ids) - sample.written_tokens for sample in samples)
    return {
        "environment/turns": Mean(sum(len(sample.turns) for sample in samples), count),
        "environment/tokens": Mean(environment_tokens, count),
        "environment/left_out": Mean(sum(sample.left_out for sample in samples), count),
        "environment/failed_fraction": Mean(failures.total(), count),
        **{f"environment/{cause}": Sum(failures[cause]) for cause in ENVIRONMENT_CAUSES},
    }


def mean_overlong_penalty(samples: Sequence[Sample], limit: int, reward: RewardConfig) -> Mean:
    """The mean that the soft punishment of long responses adds to the reward."""
    penalties = [
        overlong_penalty(
            sample.written_tokens, limit, reward.overlong_fraction, reward.overlong_penalty
        )
        for sample in samples
    ]
    return Mean(sum(penalties), len(penalties))


def from_quantized(samples: Sequence[Sample], scheme: str, unquantized_since: int | None) -> bool:
    """True where a token of a sample came from quantized weights.

    Args:
        scheme: the recipe's.
        unquantized_since: the version at which the guard fell back; None: it has not.
    """
    if scheme == "none" or unquantized_since is None:
        return scheme != "none"
    return any(version < unquantized_since for sample in samples for version, _ in sample.versions)
