"""Scores of many responses, in order, within a bounded time, whatever the model wrote.

Checking mathematics means running sympy on text that a model made up: it may hang, eat memory, or
crash the interpreter, and so may a function of the user's. So it happens in processes that can be
killed and replaced.

A worker may also die of what is no fault of the answer: a full machine, somebody's kill. What it
was checking is checked again, by another one.
"""

import math
import selectors
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from qurl_megatron.config import RewardConfig
from qurl_megatron.errors import CAUSES, ConfigError, Unscored
from qurl_megatron.rewards.item import Score, as_score
from qurl_megatron.runtime.line_worker import START_S, LineWorker, parsed

WORKER = "qurl_megatron.rewards.worker"
TRIES = 2  # workers that may end with an item before the item is to blame
FAILED_STARTS = 2  # in a row; more are no accident
LOOK_S = 0.5  # between looks whether the pool is being left

Line = str
"""An item as JSON."""


class Abandoned(RuntimeError):
    """Responses are no longer scored: the run ends, or was asked to."""


class WorkerPool:
    """The workers of one reward. Use as a context manager; leaving it ends them."""

    def __init__(self, config: RewardConfig, key: str = "reward") -> None:
        """
        Args:
            config: without a mix.
            key: of this reward in the recipe, or the option that names it; for messages.
        """
        self.config, self.key = config, key
        self._failed_starts = 0  # in a row
        self._workers: list[_Worker] = []
        self._leaving = threading.Event()

    def __enter__(self) -> "WorkerPool":
        # Not waited for: they import while the engines start.
        self._workers = [_Worker(self.config, self.key) for _ in range(self.config.workers)]
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def leave(self) -> None:
        """Have calls under way in other threads raise soon, and not score what is left."""
        self._leaving.set()

    def score(self, lines: Sequence[Line], stop: Callable[[], bool] = lambda: False) -> list[Score]:
        """What each item got, in order.

        Raises:
            RuntimeError: no worker can be started, and its own message is on stderr.
            Abandoned: the pool is being left, or ``stop()`` became true.
            ConfigError: the reward cannot be used any more: its file has gone, say.
        """
        assert self._workers, "score() outside the pool's with block"
        # Samples of one prompt often agree to the letter: each distinct item is scored once.
        work = _Work(lines, self.config, stop)
        try:
            self._run(work)
        finally:
            # After an exception in the middle, no worker may be left with half a request.
            self._workers = [w.replaced() if w.batch else w for w in self._workers]
        return [work.scores[line] for line in lines]

    def await_start(self) -> None:
        """Until all workers have said that they are ready.

        Raises:
            RuntimeError, ConfigError: as ``score``.
        """
        nothing = _Work((), self.config)
        while not all(worker.ready for worker in self._workers):
            self._go_on(nothing)

    def _run(self, work: "_Work") -> None:
        """Keep every worker busy until each item has its score."""
        while work.left or any(worker.batch for worker in self._workers):
            if time.monotonic() >= work.end:
                return work.give_up()
            for index, worker in enumerate(self._workers):
                if worker.ready and not worker.batch and work.left:
                    if worker.dead():  # killed while it was idle
                        self._workers[index] = worker.replaced()
                    else:
                        worker.begin(work.next(worker.size, len(self._workers)))
            self._go_on(work)

    def _go_on(self, work: "_Work") -> None:
        """Wait for what comes first, words or a deadline, and act on it."""
        if self._leaving.is_set() or work.stop():
            raise Abandoned("responses are no longer scored: the run ends")
        for index in self._wait(work.end):
            worker = self._workers[index]
            batch, line = worker.batch, worker.receive()
            if line is None:
                continue
            said = parsed(line)
            if isinstance(said, dict) and "refused" in said:
                raise ConfigError(said["refused"])
            if isinstance(said, dict) and "ready" in said:
                self._failed_starts = 0
                worker.settle(said["ready"])
            elif batch and (scores := _scores(said, len(batch))):
                work.scored(batch, scores)
                worker.settle(worker.size)
            else:
                self._replace(index, "ended")
                work.downed(batch)
        for index, worker in enumerate(self._workers):
            if time.monotonic() >= worker.deadline:
                work.timed_out(worker.batch)
                self._replace(index, f"was not ready after {START_S:.0f} s")

    def _replace(self, index: int, why: str) -> None:
        """
        Raises:
            RuntimeError: it had not started, nor had others before it: that is no accident.
        """
        worker = self._workers[index]
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts > FAILED_STARTS:
                raise RuntimeError(f"a reward worker {why} while starting; see stderr")
        self._workers[index] = worker.replaced()

    def _wait(self, end: float) -> list[int]:
        """Indices of workers with something to say; empty when a deadline comes first."""
        first = min(end, *(worker.deadline for worker in self._workers))
        with selectors.DefaultSelector() as selector:
            for index, worker in enumerate(self._workers):
                selector.register(worker.results, selectors.EVENT_READ, index)
            events = selector.select(max(0.0, min(first - time.monotonic(), LOOK_S)))
        return [key.data for key, _ in events]


class _Work:
    """What is to be scored in one call, and what has been.

    A batch that brings its worker down, or takes too long, goes on as two halves: the one response
    that is to blame is found, and the others get their scores.
    """

    def __init__(
        self,
        lines: Iterable[Line],
        config: RewardConfig,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config, self.stop = config, stop
        self.scores: dict[Line, Score] = {}
        self.end = math.inf
        self._waiting = deque(dict.fromkeys(lines))
        self._again: deque[tuple[Line, ...]] = deque()
        self._downed: Counter[Line] = Counter()  # workers that died of one, or were killed with it
        self._all = tuple(self._waiting)

    @property
    def left(self) -> bool:
        return bool(self._again or self._waiting)

    def next(self, size: int, workers: int) -> tuple[Line, ...]:
        """Up to ``size`` items, and no more than leave something for the other workers. With the
        first of them begins what a server has time for."""
        if self.config.url and self.end == math.inf:
            self.end = time.monotonic() + self.config.url_deadline_s
        if self._again:
            return self._again.popleft()
        size = min(size, math.ceil(len(self._waiting) / workers))
        return tuple(self._waiting.popleft() for _ in range(size))

    def scored(self, batch: tuple[Line, ...], scores: Sequence[Score]) -> None:
        self.scores.update(zip(batch, scores, strict=True))

    def downed(self, batch: tuple[Line, ...]) -> None:
        """A worker ended with these: they go to another one, unless that has been tried."""
        if len(batch) != 1:
            return self._halve(batch)
        self._downed[batch[0]] += 1
        if self._downed[batch[0]] < TRIES:
            self._again.appendleft(batch)
        else:
            self.scores[batch[0]] = Unscored("crashes", f"{TRIES} workers one after the other")

    def timed_out(self, batch: tuple[Line, ...]) -> None:
        if len(batch) != 1:
            return self._halve(batch)
        why = f"reward.timeout_s={self.config.timeout_s:g}"
        self.scores[batch[0]] = Unscored("timeouts", why)

    def give_up(self) -> None:
        why = f"{self.config.url} within reward.url_deadline_s"
        late = Unscored("unanswered", f"{why}={self.config.url_deadline_s:g}")
        self.scores = dict.fromkeys(self._all, late) | self.scores
        self._waiting.clear()
        self._again.clear()

    def _halve(self, batch: tuple[Line, ...]) -> None:
        half = len(batch) // 2
        self._again.extend(part for part in (batch[:half], batch[half:]) if part)


class _Worker(LineWorker):
    """One process and the items it is scoring."""

    def __init__(self, config: RewardConfig, key: str) -> None:
        super().__init__(WORKER, {"key": key, "config": asdict(config)})
        self.config, self.key = config, key
        self.ready = False
        self.size = 1  # items that it takes at once
        self.batch: tuple[Line, ...] = ()

    def begin(self, batch: tuple[Line, ...]) -> None:
        """Send items."""
        self.batch = batch
        # A server has retries, and a limit for all of them.
        limit = self.config.url_deadline_s if self.config.url else self.config.timeout_s
        self.deadline = time.monotonic() + limit
        self.send(f"[{','.join(batch)}]\n".encode("ascii"))

    def settle(self, size: int) -> None:
        """It has said what it had to say, and waits for up to ``size`` items."""
        self.ready, self.size = True, size
        self.batch, self.deadline = (), math.inf

    def replaced(self) -> "_Worker":
        self.kill()
        return _Worker(self.config, self.key)


def _scores(said: Any, count: int) -> list[Score] | None:
    """What a worker said of ``count`` items; None where it is nothing that workers say."""
    if not isinstance(said, list) or len(said) != count:
        return None
    return [_score(one) for one in said]


def _score(said: Any) -> Score:
    if isinstance(said, dict) and said.keys() == {"cause", "why"} and said["cause"] in CAUSES:
        return Unscored(said["cause"], str(said["why"]))
    return as_score(said)
