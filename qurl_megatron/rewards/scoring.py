"""Scores of many responses, in order, within a bounded time, whatever the model wrote.

A batch that brings its worker down, or takes too long, goes on as two halves: the one response that
is to blame is found, and the others get their scores.
"""

import math
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import asdict
from functools import partial
from typing import Any

from qurl_megatron.config import RewardConfig
from qurl_megatron.kit.errors import CAUSES, Unscored
from qurl_megatron.rewards.item import Score, as_score
from qurl_megatron.rewards.line_pool import LOOK_S, TRIES, Abandoned, LinePool

Line = str
"""An item as JSON."""


class WorkerPool(LinePool):
    """The workers of one reward. Use as a context manager; leaving it ends them."""

    def __init__(self, config: RewardConfig, key: str = "reward") -> None:
        """
        Args:
            config: without a mix.
            key: of this reward in the recipe, or the option that names it; for messages.
        """
        self.config = config
        super().__init__(
            "qurl_megatron.rewards.worker",
            {"key": key, "config": asdict(config)},
            config.workers,
            called="a reward worker",
            limit_key="reward.timeout_s",
        )

    def score(self, lines: Sequence[Line], stop: Callable[[], bool] = lambda: False) -> list[Score]:
        """Return the score of each item, in order.

        Raises:
            RuntimeError: no worker can be started, and its own message is on stderr.
            Abandoned: the pool is being left, or ``stop()`` became true.
            ConfigError: the reward cannot be used any more: its file has gone, say.
        """
        assert self.seats, "score() outside the pool's with block"
        # Samples of one prompt often agree to the letter: each distinct item is scored once.
        distinct = list(dict.fromkeys(lines))
        size = self._most_at_once(stop) if distinct else 1
        size = min(size, math.ceil(len(distinct) / self.count))  # something for every worker
        end = time.monotonic() + self.config.url_deadline_s if self.config.url else math.inf
        # A server has retries, and a limit for all of them.
        limit = self.config.url_deadline_s if self.config.url else self.config.timeout_s
        pending: dict[Future, Sequence[Line]] = {}
        done: queue.SimpleQueue[Future] = queue.SimpleQueue()
        scores: dict[Line, Score] = {}

        def ask(batch: Sequence[Line]) -> None:
            # An item that brought its worker down within a batch is asked again alone, and is to
            # blame if it does so then.
            tries = TRIES if len(batch) == 1 else 1
            read = partial(_scores, count=len(batch))
            answer = self.put(f"[{','.join(batch)}]", limit, read, tries=tries)
            pending[answer] = batch
            answer.add_done_callback(done.put)

        try:
            for start in range(0, len(distinct), size or 1):
                ask(distinct[start : start + size])
            while pending and (remaining_s := end - time.monotonic()) > 0:
                self._refuse_if_left(stop)
                try:
                    answer = done.get(timeout=min(remaining_s, LOOK_S))
                except queue.Empty:
                    continue
                batch, result = pending.pop(answer), answer.result()
                if not isinstance(result, Unscored):
                    scores.update(zip(batch, result, strict=True))
                elif len(batch) == 1:
                    scores[batch[0]] = result
                else:
                    half = len(batch) // 2
                    ask(batch[:half])
                    ask(batch[half:])
        finally:
            for answer in pending:
                answer.cancel()
        reason = f"{self.config.url} within reward.url_deadline_s={self.config.url_deadline_s:g}"
        return [scores.get(line, Unscored("unanswered", reason)) for line in lines]

    def _most_at_once(self, stop: Callable[[], bool]) -> int:
        """Return how many items a worker takes, by its ready message."""
        while True:
            self._refuse_if_left(stop)
            try:
                return self.started.result(timeout=LOOK_S)
            except NotYet:
                pass

    def _refuse_if_left(self, stop: Callable[[], bool]) -> None:
        if self.leaving.is_set() or stop():
            raise Abandoned


def _scores(answer: Any, count: int) -> list[Score]:
    """
    Raises:
        ValueError: no worker says this.
    """
    if not isinstance(answer, list) or len(answer) != count:
        raise ValueError(f"{answer!r:.80} is no list of {count} scores")
    return [_score(value) for value in answer]


def _score(value: Any) -> Score:
    if isinstance(value, dict) and value.keys() == {"cause", "why"} and value["cause"] in CAUSES:
        return Unscored(value["cause"], str(value["why"]))
    return as_score(value)
