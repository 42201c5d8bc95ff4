"""Many questions to workers that answer JSON lines, each within a bounded time.

What a worker runs may hang, eat memory or crash. So each has a thread here that waits for it, for
no longer than it has, and starts another in its place: whoever fails is known, and costs no other
question its answer. A worker may also die of what is no fault of the question, a full machine or
somebody's kill; so another one is asked, once.
"""

import queue
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from qurl_megatron.kit.errors import ConfigError, Unscored
from qurl_megatron.rewards.line_worker import LineWorker, parsed

TRIES = 2  # workers that may end with a question before the question is to blame
STARTS = 3  # as many that fail in a row are no accident
START_S = 120.0  # sympy takes seconds to import, many on a busy machine
LOOK_S = 0.2  # between looks whether an answer is still wanted


class Abandoned(RuntimeError):
    """Nothing is answered any more: the run ends, or was asked to."""

    def __init__(self) -> None:
        super().__init__("responses are no longer scored or answered: the run ends")


class _Late(Exception):
    """A worker said nothing by its deadline."""


@dataclass(frozen=True)
class _Question:
    line: str
    limit_s: float
    tries: int
    read: Callable[[Any], Any]
    answer: Future


class LinePool:
    """Use as a context manager; leaving it ends the workers."""

    def __init__(
        self, module: str, task: dict[str, Any], workers: int, *, called: str, limit_key: str
    ) -> None:
        """
        Args:
            module: what a worker runs, with the task as JSON for its argument; it speaks as
                ``line_worker.serve`` does.
            called: a worker's name in messages.
            limit_key: of the recipe, that says how long an answer may take.
        """
        self.module, self.task, self.count = module, task, workers
        self.called, self.limit_key = called, limit_key
        self.start_s = START_S
        self.seats: list[_Seat] = []

    def __enter__(self) -> Self:
        self.questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self.leaving = threading.Event()
        self.asking = threading.Lock()  # so that no question comes after the last word
        self.started: Future[Any] = Future()  # what the first that is ready says of itself
        self.failed: list[_Seat] = []  # those whose first worker could not be started
        # Not waited for: they import while the engines start.
        self.seats = [_Seat(self) for _ in range(self.count)]
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()
        for seat in self.seats:
            seat.thread.join()
        self.seats = []

    def leave(self) -> None:
        """Have what is asked, now or later, end soon, with ``Abandoned``."""
        with self.asking:
            self.leaving.set()
            for _ in self.seats:
                self.questions.put(None)

    def await_start(self) -> None:
        """Until a worker is ready.

        Raises:
            ConfigError: it says that it cannot be used.
            RuntimeError: none can be started; its own message is on stderr.
        """
        self.started.result()

    def put(
        self, line: str, limit_s: float, read: Callable[[Any], Any], *, tries: int = TRIES
    ) -> Future:
        """Ask for the answer to a line of ASCII; any thread may. Cancelling the future replaces
        the worker that is answering it.

        Args:
            read: the answer in a worker's line; ValueError where that is none.
            tries: workers that may end with it.

        Returns:
            What ``read`` returns, or Unscored: "timeouts" or "crashes". It raises as
            ``await_start``, or Abandoned.
        """
        answer: Future[Any] = Future()
        with self.asking:
            if self.leaving.is_set():
                answer.set_exception(Abandoned())
            else:
                self.questions.put(_Question(line, limit_s, tries, read, answer))
        return answer


class _Seat:
    """A thread, and the worker that answers it one question after the other."""

    ready: bool  # the worker said so

    def __init__(self, pool: LinePool) -> None:
        self.pool = pool
        self.worker: LineWorker | None = None
        self._renew()
        self.thread = threading.Thread(target=self._serve, name="worker", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        try:
            self._begin()
            while (question := self.pool.questions.get()) is not None:
                if not question.answer.cancelled():
                    _settle(question.answer, partial(self._answered, question))
        finally:
            self._end()

    def _begin(self) -> None:
        """Start the first worker, and say that the pool can be used, or that it cannot."""
        first_start: Future[Any] = Future()
        _settle(first_start, self._start)
        if not isinstance(first_start.exception(), ConfigError | None):
            self.pool.failed.append(self)
            if len(self.pool.failed) < self.pool.count:
                return  # another seat's may start
        _settle(self.pool.started, first_start.result)

    def _start(self, dropped: Callable[[], bool] = lambda: False) -> Any:
        """Have a worker that is ready.

        Returns:
            What it said of itself, if it had not said so before.

        Raises:
            As ``LinePool.await_start``; Abandoned.
        """
        if (
            self.ready and self.worker is not None and self.worker.dead()
        ):  # killed while it was idle
            self._renew()
        if self.ready:
            return None
        problem = ""
        for _ in range(STARTS):
            try:
                self.worker = self.worker or self._another()
                message, problem = parsed(self._hear(dropped)), "ended while starting; see stderr"
            except OSError as error:
                message, problem = None, f"cannot be started: {error}"
            except _Late:
                message, problem = None, f"was not ready after {self.pool.start_s:g} s; see stderr"
            match message:
                case {"refused": str(refusal)}:
                    raise ConfigError(refusal)
                case {"ready": of_itself}:
                    self.ready = True
                    return of_itself
            self._end()
        raise RuntimeError(f"{self.pool.called} {problem}")

    def _answered(self, question: _Question) -> Any:
        dropped = question.answer.cancelled
        for _ in range(question.tries):
            self._start(dropped)
            worker = self._at_work()
            worker.deadline = time.monotonic() + question.limit_s
            worker.send(question.line.encode("ascii"))
            try:
                return question.read(parsed(self._hear(dropped)))
            except _Late:
                self._renew()
                return Unscored("timeouts", f"{self.pool.limit_key}={question.limit_s:g}")
            except Abandoned:
                self._renew()
                raise
            except ValueError:  # it ended, or its line is no worker's
                self._renew()
        return Unscored("crashes", f"{question.tries} workers one after the other")

    def _hear(self, dropped: Callable[[], bool]) -> bytes:
        """A line of the worker; empty where it has ended.

        Raises:
            _Late: its deadline came first.
            Abandoned: nobody waits for it any more.
        """
        worker, look = self._at_work(), select.poll()
        look.register(worker.results, select.POLLIN)
        while not (self.pool.leaving.is_set() or dropped()):
            remaining_s = worker.deadline - time.monotonic()
            events = look.poll(1000 * min(max(remaining_s, 0.0), LOOK_S))
            if events and (line := worker.receive()) is not None:
                return line
            if remaining_s <= 0:
                raise _Late
        raise Abandoned

    def _renew(self) -> None:
        """Another worker, which may start before the next question; none where all are to end."""
        self.ready = False
        if not self.pool.leaving.is_set():
            self._end()
            with suppress(OSError):  # ``_start`` tries again, and reports the fault
                self.worker = self._another()

    def _another(self) -> LineWorker:
        return LineWorker(self.pool.module, self.pool.task, self.pool.start_s)

    def _at_work(self) -> LineWorker:
        assert self.worker is not None, "there is one while a question is asked"
        return self.worker

    def _end(self) -> None:
        worker, self.worker = self.worker, None
        if worker:
            worker.kill()


def _settle(future: Future, act: Callable[[], Any]) -> None:
    """With what ``act`` returns or raises, unless it was cancelled or settled by another thread."""
    try:
        settle = partial(future.set_result, act())
    except Exception as error:  # for whoever waits
        settle = partial(future.set_exception, error)
    with suppress(InvalidStateError):
        settle()
