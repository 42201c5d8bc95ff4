"""The next message of many conversations at once, each within a bounded time.

An environment is the user's code, and what it is given a model made up: it may hang, eat memory or
crash. So it runs in processes that can be killed and replaced, each of which answers one response
at a time: whoever takes too long is known, and costs no other its answer. Here a thread stands for
each process.
"""

import queue
import select
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from qurl_megatron.config import RolloutConfig
from qurl_megatron.environments.reply import Message, Reply, as_reply, request
from qurl_megatron.errors import CAUSES, ConfigError, unscored
from qurl_megatron.runtime.line_worker import LineWorker, parsed

WORKER = "qurl_megatron.environments.worker"
TRIES = 2  # workers that may end with a call before the call is to blame
FAILED_STARTS = 2  # in a row; more are no accident
LOOK_S = 0.5  # between looks whether the pool is being left


class EnvironmentPool:
    """Use as a context manager; leaving it ends the workers."""

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self._calls: queue.SimpleQueue[tuple[str, Future] | None] = queue.SimpleQueue()
        self._leaving = threading.Event()
        self._seats: list[_Seat] = []

    def __enter__(self) -> "EnvironmentPool":
        # Their processes import while the engines start.
        self._seats = [
            _Seat(self.config, self._calls, self._leaving)
            for _ in range(self.config.environment_workers)
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()
        for seat in self._seats:
            seat.thread.join()
        self._seats = []
        with suppress(queue.Empty):
            while True:
                if call := self._calls.get_nowait():
                    call[1].cancel()

    def leave(self) -> None:
        """Have calls under way end soon, with a RuntimeError."""
        self._leaving.set()
        for _ in self._seats:
            self._calls.put(None)

    def ask(
        self, messages: Sequence[Message], response: str, answer: str, metadata: dict[str, Any]
    ) -> "Future[Reply]":
        """What the environment answers; any thread may ask.

        The future raises ConfigError where the environment cannot be used any more, and
        RuntimeError where no worker can be started or the pool is being left.
        """
        future: Future[Reply] = Future()
        self._calls.put((request(messages, response, answer, metadata), future))
        return future

    def await_start(self) -> None:
        """Until a worker says that it is ready.

        Raises:
            ConfigError: the environment cannot be used.
            RuntimeError: no worker can be started; its own message is on stderr.
        """
        self._seats[0].started.result()


def check_environment(config: RolloutConfig) -> None:
    """Start and end a worker of the recipe's environment, which imports it.

    Raises:
        ConfigError: it cannot be used.
    """
    if not config.environment:
        return
    with EnvironmentPool(replace(config, environment_workers=1)) as pool:
        try:
            pool.await_start()
        except RuntimeError as error:
            raise ConfigError(f"rollout.environment={config.environment}: {error}") from None


class _Left(RuntimeError):
    """The pool is being left."""


class _Seat:
    """A thread, and the process that it has answer one call after the other."""

    def __init__(
        self, config: RolloutConfig, calls: queue.SimpleQueue, leaving: threading.Event
    ) -> None:
        self.config, self.calls, self.leaving = config, calls, leaving
        self.started: Future[None] = Future()
        self.worker: LineWorker | None = None
        self.thread = threading.Thread(target=self._serve, name="environment", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        try:
            self._start()
            self.started.set_result(None)
        except Exception as error:  # for whoever waits; each call tries again, and says it, too
            self.started.set_exception(error)
        try:
            while (call := self.calls.get()) is not None:
                line, future = call
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    future.set_result(self._answer(line))
                except Exception as error:  # for whoever waits
                    future.set_exception(error)
        finally:
            self._end()

    def _start(self) -> LineWorker:
        """The worker, ready for a call; another one where it has ended.

        Raises:
            ConfigError: the environment cannot be used.
            RuntimeError: a worker ended before it was ready, time and again; or as ``_hear``.
        """
        if self.worker is not None and not self.worker.dead():
            return self.worker
        self._end()
        config = self.config
        for _ in range(1 + FAILED_STARTS):
            task = {"name": config.environment, "memory_gb": config.environment_memory_gb}
            self.worker = LineWorker(WORKER, task)
            match parsed(self._hear() or b""):
                case {"refused": str(why)}:
                    self._end()
                    raise ConfigError(why)
                case {"ready": _}:
                    return self.worker
            self._end()
        raise RuntimeError("a worker of the environment ended while starting; see stderr")

    def _answer(self, line: str) -> Reply:
        for _ in range(TRIES):
            worker = self._start()
            worker.deadline = time.monotonic() + self.config.turn_timeout_s
            worker.send(line.encode("ascii") + b"\n")
            heard = self._hear()
            if heard is None:
                self._end()
                return unscored(
                    "timeouts", f"rollout.turn_timeout_s={self.config.turn_timeout_s:g}"
                )
            match parsed(heard):
                case {"reply": reply}:
                    return as_reply(reply)
                case {"failed": {"cause": str(cause), "why": str(why)}} if cause in CAUSES:
                    return unscored(cause, why)
            self._end()
        return unscored("crashes", f"{TRIES} workers one after the other")

    def _hear(self) -> bytes | None:
        """A line of the worker: empty where it has ended, None where its deadline passes first.

        Raises:
            _Left: the pool is being left.
        """
        worker, look = self.worker, select.poll()
        look.register(worker.results, select.POLLIN)
        while not self.leaving.is_set():
            rest = worker.deadline - time.monotonic()
            if rest <= 0:
                return None
            if look.poll(1000 * min(rest, LOOK_S)) and (line := worker.receive()) is not None:
                return line
        raise _Left("the environment is no longer asked: the run ends")

    def _end(self) -> None:
        if self.worker is not None:
            self.worker.kill()
            self.worker = None
