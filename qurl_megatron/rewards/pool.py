"""The reward of a recipe: one, or several that are added up, and a count of what went wrong."""

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
    from qurl_megatron.types import Sample

IN_PROCESS = {"last_number", "exact"}  # microseconds a check: no worker needed
FIXES = {
    "unanswered": "start its server, or have it answer",
    "refused": "fix what the server says is wrong, or have it answer as docs/rewards.md shows",
    "environment": "fix rollout.environment",
}
"""Advice, by the one cause for which responses have no score."""


class RewardDown(Foreseen):
    """Servers did not score, and may when the run is started again."""


def items_of(samples: "Iterable[Sample]", texts: Iterable[str]) -> list[Item]:
    """Turn decoded responses of the policy into items, as rewards get them.

    A response whose conversation failed in the environment has no score.
    """
    return [
        Item(sample.prompt.text, text, sample.prompt.answer, sample.prompt.metadata, _lost(sample))
        for sample, text in zip(samples, texts, strict=True)
    ]


def _lost(sample: "Sample") -> Unscored | None:
    failure = sample.failure
    if failure is None:
        return None
    event = {**CAUSES, "invalid": "said no message"}[failure.cause]
    return unscored("environment", f"{event}: {failure.why}")


@dataclass
class Tally:
    """The outcome of some responses, for metrics and messages; adds up over calls."""

    responses: int = 0
    failed: int = 0  # responses that a reward gave no score
    ways: Counter[str] = field(default_factory=Counter)  # in which they failed, see ``way_of``
    first: dict[str, str] = field(default_factory=dict)  # why, by way
    parts: dict[str, float] = field(default_factory=dict)  # sum of the scores, by name in the mix

    def add(self, other: "Tally") -> None:
        self.responses += other.responses
        self.failed += other.failed
        self.ways.update(other.ways)
        self.first = other.first | self.first
        for name, total in other.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + total

    @property
    def causes(self) -> Counter[str]:
        """How many failed, by cause."""
        counts: Counter[str] = Counter()
        for way, count in self.ways.items():
            counts[_cause(way)] += count
        return counts

    def metrics(self) -> dict[str, Metric]:
        """Below ``reward/``: the share that failed, how many of each cause, each part's mean."""
        causes = self.causes
        return {
            "reward/failed_fraction": Mean(self.failed, self.responses),
            **{f"reward/{cause}": Sum(causes[cause]) for cause in CAUSES},
            **{f"reward/mix/{n}": Mean(total, self.responses) for n, total in self.parts.items()},
        }

    @property
    def unscored(self) -> str:
        """How many of how many, and why, for a person."""
        return (
            f"{self.failed} of {how_many(self.responses, 'response')} could not be scored: "
            f"{self.said()}"
        )

    def said(self, ways: Collection[str] | None = None) -> str:
        """Describe what went wrong, as "2 raised (ValueError: no unit (score.py, line 3)), 1 ...".

        Args:
            ways: of these alone.
        """
        order = list(CAUSES)
        ordered_ways = sorted(
            self.ways.keys() if ways is None else self.ways.keys() & ways,
            key=lambda way: (order.index(_cause(way)), way),
        )
        return ", ".join(
            f"{self.ways[w]} {CAUSES[_cause(w)]} ({self.first[w]})" for w in ordered_ways
        )


@dataclass(frozen=True)
class Grades:
    """Finite scores, in the order of the responses, and what became of them."""

    scores: list[float]
    tally: Tally
    failures: list[Unscored | None]  # why each has no score of its own


class RewardPool:
    """Use as a context manager; leaving it ends the workers."""

    def __init__(self, config: RewardConfig, key: str = "reward") -> None:
        """
        Args:
            key: of its section, or the option that names a single one; for messages.
        """
        self.config, self.key = config, key
        self.tally = Tally()  # of all calls
        worker_parts = {key: part for key, part in self._parts.items() if not _in_process(part)}
        self.pools = {key: WorkerPool(part, key) for key, part in worker_parts.items()}
        self._stack = ExitStack()

    @property
    def _parts(self) -> dict[str, RewardConfig]:
        return _parts(self.config, self.key)

    def __enter__(self) -> "RewardPool":
        with ExitStack() as stack:
            for pool in self.pools.values():
                stack.enter_context(pool)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def leave(self) -> None:
        """Have calls under way in other threads end soon, with a RuntimeError."""
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
        to_score = [item for item in items if item.failure is None]
        scored = [iter(part) for part in self._results(to_score, stop)]
        results = [[item.failure or next(part) for item in items] for part in scored]
        names = tuple(config.mix)
        tally = _tally(results, names, config.failed)
        self.tally.add(tally)
        if tally.failed and config.on_failure == "stop":
            raise _kind(tally)(
                f"{tally.unscored}; {_fix(tally)}, or set reward.on_failure=score to give such "
                "responses reward.failed"
            )
        scores = [
            sum(w * _number(s, config.failed) for w, s in zip(weights, row, strict=True))
            for row in zip(*results, strict=True)
        ]
        return Grades(scores, tally, [_failure(row, names) for row in zip(*results, strict=True)])

    def _results(self, items: Sequence[Item], stop: Callable[[], bool]) -> list[list[Score]]:
        """The scores of each part, all parts at once."""
        parts = self._parts.items()
        if len(parts) == 1:
            return [self._scored(key, part, items, stop) for key, part in parts]
        with ThreadPoolExecutor(len(parts), thread_name_prefix="reward") as threads:
            scored = partial(self._scored, items=items, stop=stop)
            return list(threads.map(scored, self._parts.keys(), self._parts.values()))

    def _scored(
        self, key: str, part: RewardConfig, items: Sequence[Item], stop: Callable[[], bool]
    ) -> list[Score]:
        if key in self.pools:
            if not (part.function or part.url):  # ours look at no more than these
                items = [replace(item, prompt="", metadata={}) for item in items]
            return self.pools[key].score([item.line for item in items], stop)
        check = KINDS[part.kind]
        return [check(item.response, item.answer) for item in items]


def refuse_none_scored(tally: Tally, scorer: str) -> None:
    """Where not one of some responses has a score: nothing can be learnt or measured from them.

    Args:
        scorer: the scorer, for the message.

    Raises:
        ConfigError: it is the reward's fault.
        RewardDown: it is that of a server, which may be up at another time.
    """
    if not tally.failed or tally.failed < tally.responses:
        return
    fix = _fix(
        tally, 'fix it, and call it on one response first, as docs/rewards.md shows under "Try it"'
    )
    responses = how_many(tally.responses, "response")
    none = f"{scorer} scored none of {responses}"
    if _only_cause(tally) == "environment":  # the reward was not asked
        none = f"none of {responses} could be scored"
    raise _kind(tally)(f"{none}: {tally.said()}; {fix}")


def _fix(tally: Tally, reward: str = "fix the reward") -> str:
    """Return advice; ``reward`` where it is the reward that is to blame."""
    return FIXES.get(_only_cause(tally), reward)


def _only_cause(tally: Tally) -> str:
    """Why responses have no score, where that is one thing; empty where it is several.

    Those that failed in the environment were not given to a reward, and say nothing of one: they
    count where nothing else left responses without a score.
    """
    causes = tally.causes.keys() - {"environment"} or tally.causes.keys()
    return next(iter(causes)) if len(causes) == 1 else ""


def _kind(tally: Tally) -> type[Exception]:
    return RewardDown if _only_cause(tally) == "unanswered" else ConfigError


def check_rewards(config: RewardConfig, key: str = "reward") -> None:
    """Start and end a worker of each reward that is the user's own, which imports it.

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


def _in_process(part: RewardConfig) -> bool:
    return part.kind in IN_PROCESS and not (part.function or part.url)


def way_of(score: Unscored) -> str:
    """The cause; an environment's failures also by what it did, with which their reasons begin."""
    did = score.why.partition(":")[0]
    return f"environment: {did}" if score.cause == "environment" else score.cause


def _cause(way: str) -> str:
    return way.partition(":")[0]


def _number(score: Score, failed: float) -> float:
    return failed if isinstance(score, Unscored) else score


def _failure(row: Sequence[Score], names: Sequence[str]) -> Unscored | None:
    """Why a response has no score, by the first part that gave none; None where all gave one."""
    for index, score in enumerate(row):
        if isinstance(score, Unscored):
            return replace(score, why=_why(score, names, index))
    return None


def _why(score: Unscored, names: Sequence[str], index: int) -> str:
    """Why a part gave no score; it is named where it is one of a mix, and to blame."""
    part_to_blame = names and score.cause != "environment"
    return f"reward.mix.{names[index]}: {score.why}" if part_to_blame else score.why


def _tally(results: Sequence[Sequence[Score]], names: Sequence[str], failed: float) -> Tally:
    """
    Args:
        results: by part, then by response.
        names: of the parts, where they are a mix.
    """
    rows = list(zip(*results, strict=True))
    tally = Tally(len(rows), sum(any(isinstance(s, Unscored) for s in row) for row in rows))
    for index, scores in enumerate(results):
        for score in scores:
            if isinstance(score, Unscored):
                if score.cause == "environment" and index:
                    continue  # which every part of a mix has
                tally.ways[way_of(score)] += 1
                tally.first.setdefault(way_of(score), _why(score, names, index))
        if names:
            tally.parts[names[index]] = sum(_number(score, failed) for score in scores)
    return tally
