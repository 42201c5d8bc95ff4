"""Scores of many responses, in order, within a bounded time, whatever the model wrote.

Checking mathematics means running sympy on text that a model made up: it may hang, eat memory, or
crash the interpreter. So it happens in processes that can be killed and replaced.
"""

import json
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from qurl_megatron.config import RewardConfig
from qurl_megatron.rewards.kinds import KINDS
from qurl_megatron.runtime.children import children_cores, on_cores, without_launcher

WORKER = "qurl_megatron.rewards.worker"
IN_PROCESS = {"last_number", "exact"}  # microseconds a check: no worker needed
START_S = 120.0  # sympy takes seconds to import, many on a busy machine


class RewardPool:
    """Use as a context manager; leaving it ends the workers."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.timeouts = 0  # checks that took too long and counted as wrong
        self.crashes = 0  # checks that brought their worker down and counted as wrong
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
            RuntimeError: a worker cannot be started; its own message is on stderr.
        """
        if self.config.kind in IN_PROCESS:
            score = KINDS[self.config.kind]
            return [score(text, answer) for text, answer in pairs]
        assert self._workers, "score() outside the pool's with block"
        # Samples of one prompt often agree to the letter: each distinct pair is checked once.
        scores: dict[tuple[str, str], float] = {}
        try:
            self._run(deque(dict.fromkeys(pairs)), scores)
        finally:
            # After an exception in the middle, no worker may be left with half a request.
            self._workers = [w.replaced() if w.pair else w for w in self._workers]
        return [scores[pair] for pair in pairs]

    def _run(self, waiting: deque[tuple[str, str]], scores: dict[tuple[str, str], float]) -> None:
        """Keep every worker busy until each waiting pair has its score."""
        while waiting or any(worker.pair for worker in self._workers):
            for worker in self._workers:
                if worker.ready and not worker.pair and waiting:
                    worker.begin(waiting.popleft())
            for index in self._wait():
                worker = self._workers[index]
                pair, result = worker.pair, worker.receive()
                if result == b"ready\n":
                    continue
                if result not in (b"0\n", b"1\n"):
                    if not worker.ready:
                        raise RuntimeError("a reward worker ended while starting; see stderr")
                    self.crashes += 1
                    self._workers[index] = worker.replaced()
                if pair:  # a worker may also die idle
                    scores[pair] = float(result == b"1\n")
            for index, worker in enumerate(self._workers):
                if time.monotonic() < worker.deadline:
                    continue
                if not worker.ready:
                    raise RuntimeError(f"a reward worker did not start within {START_S:.0f} s")
                self.timeouts += 1
                scores[worker.pair] = 0.0
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
                [sys.executable, "-m", WORKER, config.kind, str(config.timeout_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=without_launcher(os.environ),
                bufsize=0,  # what was read is what select reports
                process_group=0,  # the terminal's Ctrl-C goes to the trainer's group
            )
        self.results: IO[bytes] = self.process.stdout
        self.ready = False
        self.pair: tuple[str, str] | None = None
        self.deadline = time.monotonic() + START_S

    def begin(self, pair: tuple[str, str]) -> None:
        self.pair = pair
        self.deadline = time.monotonic() + self.config.timeout_s
        line = memoryview(json.dumps(pair).encode("ascii") + b"\n")
        # A worker that died idle: its results end, and the pool sees that as a crash.
        with suppress(BrokenPipeError):
            while line:
                line = line[self.process.stdin.write(line) :]

    def receive(self) -> bytes:
        """The next line; empty where the process is gone."""
        line = self.results.readline()
        self.ready = self.ready or line == b"ready\n"
        self.pair = None
        self.deadline = float("inf")
        return line

    def replaced(self) -> "_Worker":
        self.kill()
        return _Worker(self.config)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.results.close()
