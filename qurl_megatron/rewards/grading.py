"""Responses as engines gave them in, the same with their texts and scores out."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.rewards.pool import Grades, RewardPool, items_of
from qurl_megatron.types import Sample


def graded(
    samples: Sequence[Sample],
    rewards: RewardPool,
    tokenizer: Tokenizer,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[list[Sample], Grades]:
    """Return the samples with text and reward, and the outcome of each.

    Raises:
        As ``RewardPool.grade``.
    """
    decoded = [tokenizer.said(sample) for sample in samples]
    grades = rewards.grade(items_of(samples, [policy for _, policy in decoded]), stop)
    graded_samples = [
        replace(sample, text=text, reward=reward)
        for sample, (text, _), reward in zip(samples, decoded, grades.scores, strict=True)
    ]
    return graded_samples, grades
