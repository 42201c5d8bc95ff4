"""The reward of a recipe, with a count of the responses that got no score."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from qurl_megatron.config import RewardConfig
from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.kit.errors import CAUSES, ConfigError, Foreseen, Unscored, unscored
from qurl_megatron.observe.metrics import Mean, Metric, Sum
from qurl_megatron.observe.text import how_many
from qurl_megatron.rewards.judge import Judge
from qurl_megatron.rewards.verifiers import KINDS, Score
from qurl_megatron.rewards.workers import WorkerPool, as_line
from qurl_megatron.types import Sample

IN_PROCESS = {"last_number", "exact"}  # microseconds a check: no worker needed
FIXES = {
    "unanswered": "start its server, or have it answer",
    "refused": "fix what the server says is wrong, or have it answer as docs/rewards.md shows",
    "environment": "fix rollout.environment",
}
"""Advice, where all responses without a score have this one cause."""


class RewardDown(Foreseen):
    """Servers did not score, and may when the run is started again."""


@dataclass(frozen=True)
class Item:
    """One response, with everything a reward may know of its question."""

    prompt: str
    response: str
    answer: str
    metadata: dict[str, Any]


@dataclass
class Tally:
    """Counts of scored and failed responses, for metrics and messages; adds up over calls."""

    responses: int = 0
    causes: Counter[str] = field(default_factory=Counter)  # of failures, keys of ``CAUSES``
    first: dict[str, str] = field(default_factory=dict)  # the first reason, by cause

    @property
    def failed(self) -> int:
        """Responses without a score."""
        return self.causes.total()

    @classmethod
    def of(cls, scores: Iterable[Score]) -> Self:
        """Count the responses that have these scores."""
        tally = cls()
        for score in scores:
            tally.responses += 1
            if isinstance(score, Unscored):
                tally.causes[score.cause] += 1
                tally.first.setdefault(score.cause, score.why)
        return tally

    def add(self, other: "Tally") -> None:
        self.responses += other.responses
        self.causes.update(other.causes)
        self.first = other.first | self.first

    @property
    def only_cause(self) -> str:
        """The cause of every failure; empty where there are several.

        The environment's failures say nothing of a reward, which was not asked: they count where
        nothing else left responses without a score.
        """
        causes = self.causes.keys() - {"environment"} or self.causes.keys()
        return next(iter(causes)) if len(causes) == 1 else ""

    def metrics(self) -> dict[str, Metric]:
        """Metrics below ``reward/``: the share of failures, and their number by cause."""
        metrics: dict[str, Metric] = {"reward/failed_fraction": Mean(self.failed, self.responses)}
        for cause in CAUSES:
            metrics[f"reward/{cause}"] = Sum(self.causes[cause])
        return metrics

    def said(self, causes: Collection[str] = tuple(CAUSES)) -> str:
        """Describe the failures, as "2 raised (ValueError: no unit (score.py, line 3)), 1 ...".

        Args:
            causes: of these alone.
        """
        parts = []
        for cause, event in CAUSES.items():
            if cause in causes and self.causes[cause]:
                parts.append(f"{self.causes[cause]} {event} ({self.first[cause]})")
        return ", ".join(parts)


class RewardPool:
    """Use as a context manager; leaving it ends the workers."""

    def __init__(self, config: RewardConfig) -> None:
        """Raise ``ConfigError`` where the environment has no key for the reward's server."""
        self.config = config
        self.workers: WorkerPool | None = None
        self.judge = Judge(config) if config.url else None
        self._leaving = threading.Event()
        if config.function or config.kind and config.kind not in IN_PROCESS:
            self.workers = WorkerPool(
                task="reward" if config.function else "check",
                setting=config.setting,
                count=config.workers,
                memory_gb=config.memory_gb,
                limit_key="reward.timeout_s",
                limit_s=config.timeout_s,
            )

    def __enter__(self) -> "RewardPool":
        if self.workers:
            self.workers.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.workers:
            self.workers.__exit__(*exception)

    def leave(self) -> None:
        """Make calls under way in other threads end soon, with a RuntimeError."""
        self._leaving.set()
        if self.workers:
            self.workers.leave()

    def grade(
        self, items: Sequence[Item | Unscored], stop: Callable[[], bool] = lambda: False
    ) -> list[Score]:
        """Return the scores of responses, whatever they hold and whatever the reward does.

        Args:
            items: Unscored where that is known beforehand: no score is asked for.

        Raises:
            RuntimeError: no worker can be started; its own message is on stderr.
            Abandoned: the pool is being left, or ``stop()`` became true.
            ConfigError, RewardDown: the reward cannot be used any more; or gave no score, and the
                recipe wants the run to end then.
        """
        item_scores = iter(self._scores([item for item in items if isinstance(item, Item)], stop))
        scores: list[Score] = []
        for item in items:
            scores.append(next(item_scores) if isinstance(item, Item) else item)
        if self.config.on_failure == "stop" and (tally := Tally.of(scores)).failed:
            fix = FIXES.get(tally.only_cause, "fix the reward")
            raise _error(
                tally,
                f"{tally.failed} of {how_many(tally.responses, 'response')} could not be scored: "
                f"{tally.said()}; {fix}, or set reward.on_failure=score to give such responses "
                "reward.failed",
            )
        return scores

    def _scores(self, items: Sequence[Item], stop: Callable[[], bool]) -> list[Score]:
        config, scorer = self.config, self.judge or self.workers
        if scorer is None:
            return [KINDS[config.kind](item.response, item.answer) for item in items]
        if config.kind:  # ours look at response and answer alone
            items = [replace(item, prompt="", metadata={}) for item in items]
        lines = [as_line(vars(item)) for item in items]
        # Samples of one prompt often agree to the letter: each distinct item is scored once.
        distinct = list(dict.fromkeys(lines))
        if not distinct:
            return []
        answers = scorer.answers(distinct, lambda: self._leaving.is_set() or stop())
        scores = dict(zip(distinct, answers, strict=True))
        return [scores[line] for line in lines]


def graded(
    samples: Sequence[Sample],
    rewards: RewardPool,
    tokenizer: Tokenizer,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[list[Sample], list[Score]]:
    """Return the samples with text and reward, and their scores, of which some may be missing.

    Raises:
        As ``RewardPool.grade``.
    """
    texts, policy_texts = [], []
    for sample in samples:
        text, policy_text = tokenizer.texts_of(sample)
        texts.append(text)
        policy_texts.append(policy_text)
    scores = rewards.grade(items_of(samples, policy_texts), stop)
    graded_samples = []
    for sample, text, score in zip(samples, texts, scores, strict=True):
        reward = rewards.config.failed if isinstance(score, Unscored) else score
        graded_samples.append(replace(sample, text=text, reward=reward))
    return graded_samples, scores


def items_of(samples: Iterable[Sample], texts: Iterable[str]) -> list[Item | Unscored]:
    """Turn decoded responses of the policy into items, as rewards get them.

    A response whose conversation failed in the environment has no score.
    """
    items: list[Item | Unscored] = []
    for sample, text in zip(samples, texts, strict=True):
        if (failure := sample.failure) is not None:
            event = {**CAUSES, "invalid": "said no message"}[failure.cause]
            items.append(unscored("environment", f"{event}: {failure.why}"))
        else:
            prompt = sample.prompt
            items.append(Item(prompt.text, text, prompt.answer, prompt.metadata))
    return items


def refuse_none_scored(tally: Tally, scorer: str) -> None:
    """Refuse to go on where not one response has a score: there is nothing to learn or measure.

    Args:
        scorer: names the reward in the message.

    Raises:
        ConfigError: it is the reward's fault.
        RewardDown: it is a server's, which may be up at another time.
    """
    if not tally.failed or tally.failed < tally.responses:
        return
    fix = FIXES.get(
        tally.only_cause,
        'fix it, and call it on one response first, as docs/rewards.md shows under "Try it"',
    )
    responses = how_many(tally.responses, "response")
    none_scored = f"{scorer} scored none of {responses}"
    if tally.only_cause == "environment":  # the reward was not asked
        none_scored = f"none of {responses} could be scored"
    raise _error(tally, f"{none_scored}: {tally.said()}; {fix}")


def check_rewards(config: RewardConfig) -> None:
    """Raise ``ConfigError`` where the recipe's function cannot be used, or a server has no key."""
    pool = RewardPool(config)
    if pool.workers and config.function:
        pool.workers.check()


def _error(tally: Tally, message: str) -> Exception:
    return (RewardDown if tally.only_cause == "unanswered" else ConfigError)(message)
