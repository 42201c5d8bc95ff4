"""Batches that engines generate while the policy trains on earlier ones.

Batch s is what step s trains on, at version s - 1. With a staleness of k it may begin as soon as
version s - 1 - k is published: no token of it is then more than k versions old. k = 0 waits for
each version, k = 1 generates one step off, larger k hide the longest responses of a batch behind
the next ones. Batches are drawn and handed over in order, so the prompts of a step are the same
for every k; what is answered to them is not, since versions change in between.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, Generic, TypeVar

from qurl_megatron.rollout.client import EngineError
from qurl_megatron.rollout.collect import Interrupted
from qurl_megatron.types import Prompt

POLL_S = 0.1

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class _Pending(Generic[Batch]):
    step: int
    prompts: Sequence[Prompt]
    future: "Future[Batch]"
    cursor: dict[str, Any]


class Ahead(Generic[Batch]):
    """Draws prompts, has them answered in the background, hands the answers over in order."""

    def __init__(
        self,
        draw: Callable[[], tuple[Sequence[Prompt], dict[str, Any]]],
        produce: Callable[[int, Sequence[Prompt], Callable[[], bool]], Batch],
        *,
        first: int,
        last: int,
        max_staleness: int,
    ) -> None:
        """
        Args:
            draw: the next prompts, and where the ones after them go on.
            produce: (step, prompts, stop) -> batch; runs on a thread, and raises ``Interrupted``
                soon after ``stop()`` becomes true.
            first, last: the steps to produce batches for.
        """
        self._draw, self._produce = draw, produce
        self._next, self._last = first, last
        self.max_staleness = max_staleness
        self._closing = Event()
        self._pending: deque[_Pending[Batch]] = deque()
        self._pool = ThreadPoolExecutor(max_staleness + 1, thread_name_prefix="rollout")

    def __enter__(self) -> "Ahead[Batch]":
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.set()
        self._pool.shutdown(cancel_futures=True)

    def admit(self, version: int) -> None:
        """``version`` is with the engines: begin every batch that may be generated from it."""
        while self._next <= min(version + 1 + self.max_staleness, self._last):
            prompts, cursor = self._draw()
            future = self._begin(self._next, prompts)
            self._pending.append(_Pending(self._next, prompts, future, cursor))
            self._next += 1

    def retry(self) -> None:
        """Begin anew what no engine could answer: the same prompts, so nothing is lost."""
        for index, batch in enumerate(self._pending):
            if batch.future.done() and isinstance(batch.future.exception(), EngineError):
                future = self._begin(batch.step, batch.prompts)
                self._pending[index] = replace(batch, future=future)

    def _begin(self, step: int, prompts: Sequence[Prompt]) -> "Future[Batch]":
        return self._pool.submit(self._produce, step, prompts, self._closing.is_set)

    def take(self, step: int, stop: Callable[[], bool]) -> tuple[Batch, dict[str, Any]]:
        """The batch of ``step`` and where the prompts go on after it; waits for it.

        Raises:
            Interrupted: ``stop()`` became true. Nothing is lost: a restart draws the same prompts.
            EngineError: no engine could answer; after ``retry`` it can be taken again.
        """
        pending = self._pending[0]
        assert pending.step == step, f"batch {pending.step} comes before {step}"
        while True:
            try:
                batch = pending.future.result(POLL_S)
            except StillRunning:
                if stop():
                    raise Interrupted("stopped while engines were generating") from None
                continue
            self._pending.popleft()
            return batch, pending.cursor
