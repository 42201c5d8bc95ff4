"""Many questions to worker processes that answer JSON lines, each within a bounded time.

A worker runs code that nobody has seen before: a user's reward or environment, or a check of text
that a model made up. It may hang, eat memory or crash. So each worker has a thread that waits for
its answer, no longer than the time limit, and replaces it when it fails. A worker may also die
through no fault of the question (a full machine, somebody's kill), so another one is asked, once.
"""

import json
import os
import queue
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from qurl_megatron.kit.children import children_cores, on_cores, without_launcher
from qurl_megatron.kit.errors import ConfigError, Unscored
from qurl_megatron.kit.undertaker import bury, spare

TRIES = 2  # workers that may die of a question before it is to blame
STARTS = 3  # failed starts in a row that are no accident
START_S = 120.0  # sympy takes seconds to import, many on a busy machine
LOOK_S = 0.2  # between checks whether an answer is still wanted
LINE_BYTES = 1 << 24  # longest answer


class Abandoned(RuntimeError):
    """The pool is being left: the run ends, or was asked to."""

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
            module: run by each worker with the task as its JSON argument; it calls ``serve``.
            called: a worker's name in messages.
            limit_key: recipe key of the time limit, for messages.
        """
        self.module, self.task, self.count = module, task, workers
        self.called, self.limit_key = called, limit_key
        self.start_s = START_S
        self.seats: list[_Seat] = []

    def __enter__(self) -> Self:
        self.questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self.leaving = threading.Event()
        self.asking = threading.Lock()  # no question may follow the None that ends a seat
        self.started: Future[Any] = Future()  # the first worker's ready message
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
        """Make every question, asked or to come, end soon with ``Abandoned``."""
        with self.asking:
            self.leaving.set()
            for _ in self.seats:
                self.questions.put(None)

    def await_start(self) -> None:
        """Wait until a worker is ready.

        Raises:
            ConfigError: the user's code cannot be used.
            RuntimeError: no worker can be started; its own message is on stderr.
        """
        self.started.result()

    def put(
        self, line: str, limit_s: float, read: Callable[[Any], Any], *, tries: int = TRIES
    ) -> Future:
        """Ask a question, one line of ASCII, from any thread.

        Cancelling the future replaces the worker that is busy with it.

        Args:
            read: turns a worker's answer into the result; ValueError where it is none.
            tries: workers that may die of it.

        Returns:
            A future of ``read``'s result, or Unscored: "timeouts" or "crashes". It raises as
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
    """A thread, and the worker that answers its questions one after the other."""

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
        """Start the first worker; settle whether the pool can be used."""
        first_start: Future[Any] = Future()
        _settle(first_start, self._start)
        if not isinstance(first_start.exception(), ConfigError | None):
            self.pool.failed.append(self)
            if len(self.pool.failed) < self.pool.count:
                return  # another seat's may start
        _settle(self.pool.started, first_start.result)

    def _start(self, dropped: Callable[[], bool] = lambda: False) -> Any:
        """Make sure that the worker is ready.

        Returns:
            Its ready message, where it has just started.

        Raises:
            As ``LinePool.await_start``; Abandoned.
        """
        if self.ready and self.worker is not None and self.worker.dead():
            self._renew()  # killed while it was idle
        if self.ready:
            return None
        problem = ""
        for _ in range(STARTS):
            try:
                if self.worker is None:
                    self.worker = self._another()
                message, problem = _parsed(self._hear(dropped)), "ended while starting; see stderr"
            except OSError as error:
                message, problem = None, f"cannot be started: {error}"
            except _Late:
                message, problem = None, f"was not ready after {self.pool.start_s:g} s; see stderr"
            match message:
                case {"refused": str(refusal)}:
                    raise ConfigError(refusal)
                case {"ready": ready_message}:
                    self.ready = True
                    return ready_message
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
                return question.read(_parsed(self._hear(dropped)))
            except _Late:
                self._renew()
                return Unscored("timeouts", f"{self.pool.limit_key}={question.limit_s:g}")
            except Abandoned:
                self._renew()
                raise
            except ValueError:  # it died, or its line is no answer
                self._renew()
        return Unscored("crashes", f"{question.tries} workers one after the other")

    def _hear(self, dropped: Callable[[], bool]) -> bytes:
        """Return the worker's next line; empty where it has died.

        Raises:
            _Late: its deadline came first.
            Abandoned: nobody waits for the answer any more.
        """
        worker, output = self._at_work(), select.poll()
        output.register(worker.results, select.POLLIN)
        while not (self.pool.leaving.is_set() or dropped()):
            remaining_s = worker.deadline - time.monotonic()
            events = output.poll(1000 * min(max(remaining_s, 0.0), LOOK_S))
            if events and (line := worker.receive()) is not None:
                return line
            if remaining_s <= 0:
                raise _Late
        raise Abandoned

    def _renew(self) -> None:
        """Replace the worker, so that it may start before the next question comes."""
        self.ready = False
        if not self.pool.leaving.is_set():
            self._end()
            with suppress(OSError):  # ``_start`` tries again, and reports the fault
                self.worker = self._another()

    def _another(self) -> "LineWorker":
        return LineWorker(self.pool.module, self.pool.task, self.pool.start_s)

    def _at_work(self) -> "LineWorker":
        assert self.worker is not None, "there is one while a question is asked"
        return self.worker

    def _end(self) -> None:
        worker, self.worker = self.worker, None
        if worker:
            worker.kill()


class LineWorker:
    """A worker process, seen from the pool."""

    def __init__(self, module: str, task: dict[str, Any], start_s: float) -> None:
        """
        Raises:
            OSError: the machine has no room for another process or open file.
        """
        env = without_launcher(os.environ)
        env.setdefault("OMP_NUM_THREADS", "1")  # a worker is one of many
        with on_cores(children_cores()):
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(task)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=env,
                bufsize=0,  # what was read is what poll reports
                process_group=0,  # the terminal's Ctrl-C goes to the trainer's group
            )
        bury(self.process.pid)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._questions, self._answers = self.process.stdin, self.process.stdout
        os.set_blocking(self._questions.fileno(), False)
        self.results = self._answers.fileno()
        self.deadline = time.monotonic() + start_s
        self._asked = 0  # the last question's number, which its answer repeats
        self._received = b""

    def send(self, question: bytes) -> None:
        """Write a line as far as it goes by the deadline; the worker misses it if it is cut."""
        self._asked += 1
        unsent = memoryview(b"%d %s\n" % (self._asked, question))
        room = select.poll()
        room.register(self._questions, select.POLLOUT)
        # A worker that dies meanwhile: its results end, which the pool sees.
        with suppress(BrokenPipeError):
            while unsent and room.poll(1000 * max(0.0, self.deadline - time.monotonic())):
                unsent = unsent[self._questions.write(unsent) or 0 :]

    def receive(self) -> bytes | None:
        """Return the answer to the last question; before the first, the ready message.

        Returns:
            None where it is not whole yet; empty where the process is gone, or says anything else.
        """
        chunk = os.read(self.results, 1 << 16)
        self._received += chunk
        if not chunk or len(self._received) > LINE_BYTES:
            return b""
        if not self._received.endswith(b"\n"):
            return None
        number, _, answer = self._received.partition(b" ")
        self._received = b""
        return answer if number == b"%d" % self._asked else b""

    def dead(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        # Its group: it may have started processes of its own.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # where its code has moved it into another group
        self.process.wait()
        spare(self.process.pid)
        self._questions.close()
        self._answers.close()


def serve(make: Callable[[], tuple[Any, Callable[[Any], Any]]], memory_gb: float) -> None:
    """Answer question after question, in the worker process, until there are no more.

    Whatever the code prints goes to stderr, and its standard input is empty.

    Args:
        make: returns the ready message and the function that answers. Its ConfigError is sent
            instead, and ends the worker.
        memory_gb: GiB of address space.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which is for the trainer
    # A huge power is a MemoryError here, not a full machine.
    memory = int(memory_gb * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)

    # The code may fork, and its child may come back here: it must never ask or answer.
    def part_from_the_pool() -> None:
        os.dup2(nothing, requests.fileno())
        os.dup2(nothing, results.fileno())

    os.register_at_fork(after_in_child=part_from_the_pool)
    worker_pid = os.getpid()

    def say(number: bytes, value: Any) -> None:
        if os.getpid() != worker_pid:
            os._exit(1)
        results.write(b"%s %s\n" % (number, json.dumps(value).encode("ascii")))
        results.flush()

    try:
        ready_message, answer = make()
    except ConfigError as error:
        say(b"0", {"refused": str(error)})
        return
    say(b"0", {"ready": ready_message})
    for line in requests:
        number, _, question = line.partition(b" ")
        say(number, answer(json.loads(question)))


def _parsed(line: bytes) -> Any:
    """Return the JSON value of a line, or None where there is none."""
    with suppress(ValueError, RecursionError):
        return json.loads(line)
    return None


def _settle(future: Future, act: Callable[[], Any]) -> None:
    """Give the future ``act``'s result or exception, unless it is cancelled or settled already."""
    try:
        settle = partial(future.set_result, act())
    except Exception as error:  # for whoever waits
        settle = partial(future.set_exception, error)
    with suppress(InvalidStateError):
        settle()
