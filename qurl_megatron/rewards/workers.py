"""Worker processes that answer questions, each within a bounded time: rewards and environments.

A worker runs code that nobody has seen before: a user's reward or environment, or a check of text
that a model made up. It may hang, eat memory or crash, and is replaced then. A worker may also die
through no fault of the question (a full machine, somebody's kill), so another one is asked, once.
"""

import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from qurl_megatron.config import RolloutConfig
from qurl_megatron.kit.children import children_cores, on_cores, without_launcher
from qurl_megatron.kit.errors import ConfigError, Unscored
from qurl_megatron.kit.undertaker import bury, spare

TRIES = 2  # workers that a question may kill before it counts as a crash
STARTS = 3  # failed starts in a row after which no more are tried
START_S = 120.0  # sympy takes seconds to import, many on a busy machine
LOOK_S = 0.2  # between checks whether an answer is still wanted
LINE_BYTES = 1 << 24  # longest answer

Message = dict[str, Any]
"""``role`` and ``content``."""

Reply = Message | None | Unscored
"""The next message; None where the conversation is over; Unscored where the environment failed."""


class Abandoned(RuntimeError):
    """The pool is being left: the run ends, or was asked to."""

    def __init__(self) -> None:
        super().__init__("responses are no longer scored or answered: the run ends")


class Died(Exception):
    """A worker has ended, or sent something that is no answer."""


@dataclass(eq=False)
class WorkerPool:
    """Use as a context manager; leaving it ends the workers."""

    task: str  # of ``worker.TASKS``
    setting: str  # names the code that workers run, as key=value
    count: int
    memory_gb: float  # of each worker
    limit_key: str  # recipe key of the limit of an answer, for messages
    limit_s: float
    module: str = "qurl_megatron.rewards.worker"
    start_s: float = START_S

    def __enter__(self) -> Self:
        self.left = False
        self.lock = threading.Lock()  # taken to start and to end a worker
        self.workers = [Worker(self) for _ in range(self.count)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.workers:
            worker.renew()  # and not waited for: it imports while the engines start
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(self.count, thread_name_prefix="worker")
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()
        self._threads.shutdown()
        for worker in self.workers:
            worker.end()

    def leave(self) -> None:
        """Make every question, asked or to come, end soon with ``Abandoned``."""
        with self.lock:
            self.left = True
            for worker in self.workers:
                worker.kill()

    def check(self) -> None:
        """Start one worker, which imports the user's code, and end it.

        Raises:
            ConfigError: it cannot be used.
        """
        self.count = 1
        with self:
            try:
                self.workers[0].await_ready()
            except RuntimeError as error:
                raise ConfigError(str(error)) from None

    def put(self, question: str) -> Future:
        """Ask a question, JSON on one line of ASCII, from any thread.

        Returns:
            A future of the answer, or of Unscored. It raises ConfigError where the user's code
            cannot be used (any more), RuntimeError where no worker can be started, or Abandoned.
        """
        return self._threads.submit(self._answer, question)

    def answers(self, questions: Sequence[str], stop: Callable[[], bool]) -> list[Any]:
        """Return the answer to each question, in order.

        Raises:
            As a future of ``put``; Abandoned also where ``stop()`` became true.
        """
        futures = [self.put(question) for question in questions]
        pending = set(futures)
        try:
            while pending:
                if stop():
                    raise Abandoned
                done, pending = wait(pending, LOOK_S, FIRST_EXCEPTION)
                for future in done:
                    future.result()  # raises
        finally:
            for future in pending:
                future.cancel()
        return [future.result() for future in futures]

    def _answer(self, question: str) -> Any:
        worker = self._idle.get()
        try:
            for _ in range(TRIES):
                try:
                    answer = worker.ask(question)
                except Died:
                    worker.renew()
                    continue
                return Unscored(**answer["failed"]) if "failed" in answer else answer["value"]
        except TimeoutError:
            worker.renew()
            return Unscored("timeouts", f"{self.limit_key}={self.limit_s:g}")
        finally:
            self._idle.put(worker)
        return Unscored("crashes", f"{TRIES} workers one after the other")


class Worker:
    """A process that answers one question after the other, and the next one in its place."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.process: subprocess.Popen | None = None
        self.ready = False  # the process has reported that it is

    def ask(self, question: str) -> dict[str, Any]:
        """
        Raises:
            TimeoutError: the answer did not come within the pool's limit.
            Died: it will not come.
            ConfigError, RuntimeError: as ``await_ready``.
        """
        self.await_ready()
        self._question_number += 1
        line = b"%d %s\n" % (self._question_number, question.encode("ascii"))
        return self._answer_to(line, self.pool.limit_s)

    def await_ready(self) -> None:
        """Wait until the process is ready, however often it has to be started.

        Raises:
            ConfigError: the user's code cannot be used.
            RuntimeError: it cannot be started, and its own message is on stderr; or Abandoned.
        """
        if self.process is not None and self.process.poll() is not None:
            self.end()  # killed while it was idle
        problem = ""
        for _ in range(STARTS):
            try:
                if self.process is None:
                    self._start()
                if not self.ready and (refusal := self._answer_to(b"", self.pool.start_s)["value"]):
                    raise ConfigError(refusal)
                self.ready = True
                return
            except TimeoutError:
                problem = f"was not ready after {self.pool.start_s:g} s; see stderr"
            except OSError as error:  # the machine has no room for another process or open file
                problem = f"cannot be started: {error}"
            except Died:
                problem = "ended while starting; see stderr"
            self.end()
        raise RuntimeError(f"{self.pool.setting}: a worker {problem}")

    def renew(self) -> None:
        """Replace the process, so that another may start before the next question comes.

        Raises:
            Abandoned: the pool is being left.
        """
        self.end()
        with suppress(OSError):  # ``await_ready`` tries again, and reports the fault
            self._start()

    def end(self) -> None:
        with self.pool.lock:
            if self.process is None:
                return
            self.kill()
            self.process.wait()
            spare(self.process.pid)
            self._answers.close()
            self._line.close()
            self.process, self.ready = None, False

    def kill(self) -> None:
        """Kill the process; the pool's lock is held."""
        if self.process is not None:
            # Its group: it may have started processes of its own.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()  # where its code has moved it into another group

    def _start(self) -> None:
        env = without_launcher(os.environ)
        env.setdefault("OMP_NUM_THREADS", "1")  # a worker is one of many
        command = [sys.executable, "-m", self.pool.module]
        pool = self.pool
        with pool.lock:
            if pool.left:
                raise Abandoned
            self._line, child_end = socket.socketpair()
            with child_end, on_cores(children_cores()):
                self.process = subprocess.Popen(
                    [*command, pool.task, pool.setting, str(pool.memory_gb)],
                    stdin=child_end.fileno(),
                    stdout=child_end.fileno(),
                    env=env,
                    process_group=0,  # the terminal's Ctrl-C goes to the trainer's group
                )
            bury(self.process.pid)
            self._answers = self._line.makefile("rb")
            self._question_number = 0  # the last question's number, which its answer repeats

    def _answer_to(self, line: bytes, limit_s: float) -> dict[str, Any]:
        self._line.settimeout(limit_s)
        try:
            self._line.sendall(line)
            number, _, answer = self._answers.readline(LINE_BYTES).partition(b" ")
            if int(number) == self._question_number:
                return json.loads(answer)
        except TimeoutError:
            raise
        except (OSError, ValueError):  # it has gone, or says anything else
            pass
        raise Died


class EnvironmentPool(WorkerPool):
    """An environment of the user's, which answers many conversations at once."""

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        super().__init__(
            task="environment",
            setting=f"rollout.environment={config.environment}",
            count=config.environment_workers,
            memory_gb=config.environment_memory_gb,
            limit_key="rollout.turn_timeout_s",
            limit_s=config.turn_timeout_s,
        )

    def ask(
        self, messages: Sequence[Message], response: str, answer: str, metadata: dict[str, Any]
    ) -> "Future[Reply]":
        """Ask for the environment's reply to a response, as ``put`` does.

        Args:
            messages: the conversation before the response.
            answer: the reference answer of the question.
        """
        fields = {
            "messages": list(messages),
            "response": response,
            "answer": answer,
            "metadata": metadata,
        }
        return self.put(as_line(fields))


def check_environment(config: RolloutConfig) -> None:
    """Raise ``ConfigError`` where the recipe has an environment that cannot be used."""
    if config.environment:
        EnvironmentPool(config).check()


def as_line(fields: dict[str, Any]) -> str:
    """Return JSON on one line of ASCII; values that JSON lacks become text."""
    return json.dumps(_finite(fields), default=str)


def _finite(value: Any) -> Any:
    """Replace NaN and infinities by None: gaps of tables, for which JSON has no word."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
