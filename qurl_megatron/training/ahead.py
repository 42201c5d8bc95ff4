"""Batches that engines generate while the policy trains on earlier ones.

Step s trains on batch s, at version s - 1. With a staleness of k it may begin as soon as
version s - 1 - k is published: no token of it is then more than k versions old. k = 0 waits for
each version, k = 1 generates one step off, larger k hide the longest responses of a batch behind
the next ones. Batches are drawn and handed over in order, so the prompts that a step begins with
are the same for every k; the answers are not, since versions change in between.

A batch may draw further prompts while it is produced. For k > 0 these come after the prompts of
later batches, so no point in the order separates used prompts from unused ones. A batch is handed
over with the point where the next batch began to draw: a restart from there skips no prompt, and
repeats only those that earlier batches drew late. For k = 0, or where nothing is drawn late, it
repeats none.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

from qurl_megatron.fleet.client import EngineError
from qurl_megatron.kit.errors import Interrupted
from qurl_megatron.training.groups import Draft

POLL_S = 0.1

Cursor = dict[str, Any]


@dataclass(frozen=True)
class _Pending:
    step: int
    draft: Draft
    future: "Future[Draft]"
    cursor: Cursor  # where it began to draw


class Ahead:
    """Draws prompts, has them answered in the background, hands the answers over in order."""

    def __init__(
        self,
        draw: Callable[[], tuple[Cursor, Draft]],
        produce: Callable[[int, Draft, Callable[[], bool]], Draft],
        cursor: Callable[[], Cursor],
        *,
        first: int,
        last: int,
        max_staleness: int,
    ) -> None:
        """
        Args:
            draw: the prompts of the next batch, and where they begin.
            produce: (step, drawn prompts, stop) -> batch; runs on a thread, and raises
                ``Interrupted`` soon after ``stop()`` becomes true.
            cursor: where the prompts not drawn yet begin.
            first, last: the steps to produce batches for.
        """
        self._draw, self._produce, self._cursor = draw, produce, cursor
        self._next, self._last = first, last
        self._max_staleness = max_staleness
        self._closing = Event()
        self._pending: deque[_Pending] = deque()
        self._pool = ThreadPoolExecutor(max_staleness + 1, thread_name_prefix="rollout")

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.set()
        self._pool.shutdown(cancel_futures=True)

    def admit(self, version: int) -> None:
        """Begin every batch that may be generated from ``version``, which engines have now."""
        while self._next <= min(version + 1 + self._max_staleness, self._last):
            cursor, draft = self._draw()
            future = self._begin(self._next, draft)
            self._pending.append(_Pending(self._next, draft, future, cursor))
            self._next += 1

    def retry(self) -> None:
        """Restart the batches that no engine could answer: the same prompts, so nothing is lost."""
        for index, batch in enumerate(self._pending):
            if batch.future.done() and isinstance(batch.future.exception(), EngineError):
                future = self._begin(batch.step, batch.draft)
                self._pending[index] = replace(batch, future=future)

    def _begin(self, step: int, draft: Draft) -> "Future[Draft]":
        return self._pool.submit(self._produce, step, draft, self._closing.is_set)

    def take(self, step: int, stop: Callable[[], bool]) -> tuple[Draft, Cursor]:
        """Wait for the batch of ``step``; return it, and the place where the run draws next.

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
            return batch, self._pending[0].cursor if self._pending else self._cursor()
