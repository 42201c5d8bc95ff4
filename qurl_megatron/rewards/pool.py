"""The reward of a recipe: one, or a weighted sum of several, and a count of failures."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from qurl_megatron.config import RewardConfig
from qurl_megatron.kit.errors import CAUSES, ConfigError, Foreseen, Unscored, unscored
from qurl_megatron.observe.metrics import Mean, Metric, Sum
from qurl_megatron.observe.text import how_many
from qurl_megatron.rewards.item import Item, Score
from qurl_megatron.rewards.scoring import WorkerPool
from qurl_megatron.rewards.verifiers import KINDS

if TYPE_CHECKING:  # workers import this package, and need no numpy
    from qurl_megatron.data.tokenizer import Tokenizer
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


@dataclass
class Tally:
    """Counts of scored and failed responses, for metrics and messages; adds up over calls."""

    responses: int = 0
    failed: int = 0  # responses without a score from some reward
    causes: Counter[str] = field(default_factory=Counter)  # of failures, keys of ``CAUSES``
    first: dict[str, str] = field(default_factory=dict)  # the first reason, by cause
    parts: dict[str, float] = field(default_factory=dict)  # sum of the scores, by name in the mix

    def add(self, other: "Tally") -> None:
        self.responses += other.responses
        self.failed += other.failed
        self.causes.update(other.causes)
        self.first = other.first | self.first
        for name, total in other.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + total

    @property
    def only_cause(self) -> str:
        """The cause of every failure; empty where there are several.

        The environment's failures say nothing of a reward, which was not asked: they count where
        nothing else left responses without a score.
        """
        causes = self.causes.keys() - {"environment"} or self.causes.keys()
        return next(iter(causes)) if len(causes) == 1 else ""

    def metrics(self) -> dict[str, Metric]:
        """Metrics below ``reward/``: share of failures, number by cause, mean of each part."""
        metrics: dict[str, Metric] = {
            "reward/failed_fraction": Mean(self.failed, self.responses),
        }
        for cause in CAUSES:
            metrics[f"reward/{cause}"] = Sum(self.causes[cause])
        for name, total in self.parts.items():
            metrics[f"reward/mix/{name}"] = Mean(total, self.responses)
        return metrics

    @property
    def unscored(self) -> str:
        """A sentence: how many of how many have no score, and why."""
        return (
            f"{self.failed} of {how_many(self.responses, 'response')} could not be scored: "
            f"{self.said()}"
        )

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


@dataclass(frozen=True)
class Grades:
    """Finite scores, in the order of the responses."""

    scores: list[float]
    tally: Tally
    failures: list[Unscored | None]  # why a response has no score of its own


class RewardPool:
    """Use as a context manager; leaving it ends the workers."""

    def __init__(self, config: RewardConfig, key: str = "reward") -> None:
        """
        Args:
            key: of its section, or the option that names a single one; for messages.
        """
        self.config, self.key = config, key
        self.parts = _parts(config, key)
        self.tally = Tally()  # of all calls
        self.pools: dict[str, WorkerPool] = {}
        for name, part in self.parts.items():
            if part.function or part.url or part.kind not in IN_PROCESS:
                self.pools[name] = WorkerPool(part, name)
        self._stack = ExitStack()

    def __enter__(self) -> "RewardPool":
        with ExitStack() as stack:
            for pool in self.pools.values():
                stack.enter_context(pool)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def leave(self) -> None:
        """Make calls under way in other threads end soon, with a RuntimeError."""
        for pool in self.pools.values():
            pool.leave()

    def grade(self, items: Sequence[Item], stop: Callable[[], bool] = lambda: False) -> Grades:
        """Score responses, whatever they hold and whatever the rewards do.

        Raises:
            RuntimeError: no worker can be started; its own message is on stderr.
            Abandoned: the pool is being left, or ``stop()`` became true.
            ConfigError, RewardDown: a reward cannot be used any more; or one gave no score, and the
                recipe wants the run to end then.
        """
        config = self.config
        weights = [part.weight for part in config.mix.values()] or [1.0]
        names = tuple(config.mix)
        to_score = [item for item in items if item.failure is None]
        results = []
        for part_scores in self._results(to_score, stop):
            remaining = iter(part_scores)
            results.append([item.failure or next(remaining) for item in items])
        tally = _tally(results, names, config.failed)
        self.tally.add(tally)
        if tally.failed and config.on_failure == "stop":
            fix = FIXES.get(tally.only_cause, "fix the reward")
            raise _error(
                tally,
                f"{tally.unscored}; {fix}, or set reward.on_failure=score to give such responses "
                "reward.failed",
            )
        scores, failures = [], []
        for row in zip(*results, strict=True):
            weighted = zip(weights, row, strict=True)
            scores.append(sum(weight * _number(score, config.failed) for weight, score in weighted))
            failures.append(_first_failure(row, names))
        return Grades(scores, tally, failures)

    def _results(self, items: Sequence[Item], stop: Callable[[], bool]) -> list[list[Score]]:
        """Return the scores of each part, all parts at once."""
        scored = partial(self._scored, items=items, stop=stop)
        if len(self.parts) == 1:
            return [scored(key) for key in self.parts]
        with ThreadPoolExecutor(len(self.parts), thread_name_prefix="reward") as threads:
            return list(threads.map(scored, self.parts))

    def _scored(self, key: str, items: Sequence[Item], stop: Callable[[], bool]) -> list[Score]:
        part = self.parts[key]
        if key in self.pools:
            if not (part.function or part.url):  # ours look at response and answer alone
                items = [replace(item, prompt="", metadata={}) for item in items]
            return self.pools[key].score([item.line for item in items], stop)
        check = KINDS[part.kind]
        return [check(item.response, item.answer) for item in items]


def graded(
    samples: "Sequence[Sample]",
    rewards: RewardPool,
    tokenizer: "Tokenizer",
    stop: Callable[[], bool] = lambda: False,
) -> "tuple[list[Sample], Grades]":
    """Return the samples with text and reward, and their grades.

    Raises:
        As ``RewardPool.grade``.
    """
    texts, policy_texts = [], []
    for sample in samples:
        text, policy_text = tokenizer.said(sample)
        texts.append(text)
        policy_texts.append(policy_text)
    grades = rewards.grade(items_of(samples, policy_texts), stop)
    graded_samples = []
    for sample, text, reward in zip(samples, texts, grades.scores, strict=True):
        graded_samples.append(replace(sample, text=text, reward=reward))
    return graded_samples, grades


def items_of(samples: "Iterable[Sample]", texts: Iterable[str]) -> list[Item]:
    """Turn decoded responses of the policy into items, as rewards get them.

    A response whose conversation failed in the environment has no score.
    """
    items = []
    for sample, text in zip(samples, texts, strict=True):
        prompt, failure = sample.prompt, sample.failure
        if failure is not None:
            event = {**CAUSES, "invalid": "said no message"}[failure.cause]
            failure = unscored("environment", f"{event}: {failure.why}")
        items.append(Item(prompt.text, text, prompt.answer, prompt.metadata, failure))
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


def check_rewards(config: RewardConfig, key: str = "reward") -> None:
    """Start and end a worker of each reward of the user's own, which imports it.

    Args:
        key: as for ``RewardPool``.

    Raises:
        ConfigError: a function cannot be used, or the environment has no key for a server.
    """
    for name, part in _parts(config, key).items():
        if not (part.function or part.url):
            continue
        with WorkerPool(replace(part, workers=1), name) as pool:
            try:
                pool.await_start()
            except RuntimeError as error:
                raise ConfigError(f"{name} ({part.described}): {error}") from None


def _parts(config: RewardConfig, key: str) -> dict[str, RewardConfig]:
    return config.parts if config.mix else {key: config}


def _error(tally: Tally, message: str) -> Exception:
    return (RewardDown if tally.only_cause == "unanswered" else ConfigError)(message)


def _number(score: Score, failed: float) -> float:
    return failed if isinstance(score, Unscored) else score


def _first_failure(row: Sequence[Score], names: Sequence[str]) -> Unscored | None:
    for index, score in enumerate(row):
        if isinstance(score, Unscored):
            return replace(score, why=_reason(score, names, index))
    return None


def _reason(score: Unscored, names: Sequence[str], index: int) -> str:
    """Return why a part gave no score, naming it where it is one of a mix and to blame."""
    part_to_blame = names and score.cause != "environment"
    return f"reward.mix.{names[index]}: {score.why}" if part_to_blame else score.why


def _tally(results: Sequence[Sequence[Score]], names: Sequence[str], failed: float) -> Tally:
    """
    Args:
        results: by part, then by response.
        names: of the parts, where they are a mix.
    """
    tally = Tally()
    for row in zip(*results, strict=True):
        tally.responses += 1
        tally.failed += any(isinstance(score, Unscored) for score in row)
    for index, scores in enumerate(results):
        for score in scores:
            if not isinstance(score, Unscored):
                continue
            if score.cause == "environment" and index:
                continue  # counted with the first part: every part of a mix has it
            tally.causes[score.cause] += 1
            tally.first.setdefault(score.cause, _reason(score, names, index))
        if names:
            tally.parts[names[index]] = sum(_number(score, failed) for score in scores)
    return tally
