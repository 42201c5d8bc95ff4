"""Scores of many responses, in order, within a bounded time, whatever the model wrote.

Checking mathematics means running sympy on text that a model made up: it may hang, eat memory, or
crash the interpreter. So it happens in processes that can be killed and replaced.

A worker may also die of what is no fault of the answer: a full machine, somebody's kill. What it
was checking is checked again, by another one.
"""

import json
import os
import select
import selectors
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from qurl_megatron.config import RewardConfig
from qurl_megatron.rewards.kinds import KINDS
from qurl_megatron.runtime.children import children_cores, on_cores, without_launcher
from qurl_megatron.runtime.undertaker import bury, spare

WORKER = "qurl_megatron.rewards.worker"
IN_PROCESS = {"last_number", "exact"}  # microseconds a check: no worker needed
START_S = 120.0  # sympy takes seconds to import, many on a busy machine
TRIES = 2  # workers that may end with a pair before the pair is to blame
FAILED_STARTS = 2  # in a row; more are no accident

Pair = tuple[str, str]  # a text and the answer it should give


class RewardPool:
    """Use as a context manager; leaving it ends the workers."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.timeouts = 0  # checks that took too long and counted as wrong
        self.crashes = 0  # checks that brought down TRIES workers and counted as wrong
        self._failed_starts = 0  # in a row
        self._workers: list[_Worker] = []

    def __enter__(self) -> "RewardPool":
        if self.config.kind not in IN_PROCESS:
            # Not waited for: they import while the engines start.
            self._workers = [_Worker(self.config) for _ in range(self.config.workers)]
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """1.0 or 0.0 for each (text, answer), in order.

        Raises:
            RuntimeError: no worker can be started; its own message is on stderr.
        """
        if self.config.kind in IN_PROCESS:
            score = KINDS[self.config.kind]
            return [score(text, answer) for text, answer in pairs]
        assert self._workers, "score() outside the pool's with block"
        # Samples of one prompt often agree to the letter: each distinct pair is checked once.
        scores: dict[Pair, float] = {}
        try:
            self._run(deque(dict.fromkeys(pairs)), scores)
        finally:
            # After an exception in the middle, no worker may be left with half a request.
            self._workers = [w.replaced() if w.pair else w for w in self._workers]
        return [scores[pair] for pair in pairs]

    def _run(self, waiting: deque[Pair], scores: dict[Pair, float]) -> None:
        """Keep every worker busy until each waiting pair has its score."""
        downed: Counter[Pair] = Counter()  # workers that died of a pair, or were killed with it
        while waiting or any(worker.pair for worker in self._workers):
            for index, worker in enumerate(self._workers):
                if worker.ready and not worker.pair and waiting:
                    if worker.dead():  # killed while it was idle
                        self._workers[index] = worker.replaced()
                    else:
                        worker.begin(waiting.popleft())
            for index in self._wait():
                worker = self._workers[index]
                pair, result = worker.pair, worker.receive()
                if result == b"ready\n":
                    self._failed_starts = 0
                elif result in (b"0\n", b"1\n"):
                    scores[pair] = float(result == b"1\n")
                else:
                    self._replace(index, "ended")
                    if pair:
                        self._downed(pair, downed, waiting, scores)
            for index, worker in enumerate(self._workers):
                if time.monotonic() < worker.deadline:
                    continue
                if pair := worker.pair:
                    self.timeouts += 1
                    scores[pair] = 0.0
                self._replace(index, f"was not ready after {START_S:.0f} s")

    def _downed(
        self, pair: Pair, downed: Counter[Pair], waiting: deque[Pair], scores: dict[Pair, float]
    ) -> None:
        """A worker ended with this pair: it goes to another one, unless that has been tried."""
        downed[pair] += 1
        if downed[pair] < TRIES:
            waiting.appendleft(pair)
        else:
            self.crashes += 1
            scores[pair] = 0.0

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

    def _wait(self) -> list[int]:
        """Indices of workers with something to say; empty when a deadline comes first."""
        first = min(worker.deadline for worker in self._workers)
        with selectors.DefaultSelector() as selector:
            for index, worker in enumerate(self._workers):
                selector.register(worker.results, selectors.EVENT_READ, index)
            events = selector.select(max(0.0, min(first - time.monotonic(), START_S)))
        return [key.data for key, _ in events]


class _Worker:
    """One process and the pair it is checking."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        with on_cores(children_cores()):
            self.process = subprocess.Popen(
                [sys.executable, "-m", WORKER, config.kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=without_launcher(os.environ),
                bufsize=0,  # what was read is what select reports
                process_group=0,  # the terminal's Ctrl-C goes to the trainer's group
            )
        bury(self.process.pid)
        os.set_blocking(self.process.stdin.fileno(), False)
        self.results: IO[bytes] = self.process.stdout
        self.ready = False
        self.pair: Pair | None = None
        self.deadline = time.monotonic() + START_S

    def begin(self, pair: Pair) -> None:
        """Send a pair; one that does not get through has the worker time out with it."""
        self.pair = pair
        self.deadline = time.monotonic() + self.config.timeout_s
        line = memoryview(json.dumps(pair).encode("ascii") + b"\n")
        room = select.poll()
        room.register(self.process.stdin, select.POLLOUT)
        # A worker that dies meanwhile: its results end, which the pool sees.
        with suppress(BrokenPipeError):
            while line and room.poll(1000 * max(0.0, self.deadline - time.monotonic())):
                line = line[self.process.stdin.write(line) or 0 :]

    def receive(self) -> bytes:
        """The next line; empty where the process is gone."""
        line = self.results.readline()
        self.ready = self.ready or line == b"ready\n"
        self.pair = None
        self.deadline = float("inf")
        return line

    def dead(self) -> bool:
        return self.process.poll() is not None

    def replaced(self) -> "_Worker":
        self.kill()
        return _Worker(self.config)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        spare(self.process.pid)
        self.process.stdin.close()
        self.results.close()
