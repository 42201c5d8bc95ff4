"""Supervise the running training step: tell its ranks when to stop, and kill those that hang.

Whatever signal Slurm sends, the ranks get SIGUSR1 through ``srun`` (``tasks`` says why): they
finish or drop their step, save, and end. Progress is read from the run's folder.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

from qurl_megatron.cluster import commands, folder
from qurl_megatron.cluster.cluster import JobConfig
from qurl_megatron.cluster.layout import ENGINES_PREFIX
from qurl_megatron.cluster.verdict import FINAL, PERSONS, PREEMPTED, TAKEN, WALL_TIME
from qurl_megatron.kit.clock import now
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.training.state import latest

POLL_S = 0.5
WATCH_S = 2.0
"""Time between looks at the run's files."""
GLANCE_S = 10.0
"""The most that one look at the clock adds to a run's stillness. Looks are ``WATCH_S`` apart: a
longer gap is a supervisor that was suspended together with its job."""
LISTEN_S = 5.0
"""Time for the last lines of an ended step; a process that it left may hold its output open."""
STACKS_S = 5.0
"""Time for ranks to write their stacks."""
LAST_S = 35.0
"""Seconds before the time limit at which remaining ranks are killed, and then the engines: a job
that runs into its limit is not requeued."""
ENGINES_S = 15.0
"""Time for engines on nodes of their own to leave."""
KILL_S = 5.0
"""Time for ``srun`` to kill its tasks."""


class Received:
    """Notes signals inside the block, where they do not end this process."""

    def __init__(self) -> None:
        self.newest = ""

    def __enter__(self) -> "Received":
        numbers = signal.SIGUSR1, signal.SIGTERM, signal.SIGINT
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame) -> None:
        self.newest = signal.Signals(number).name.removeprefix("SIG")


class SrunStep:
    """A running ``srun``; its messages go on to the log and are read for exit codes."""

    def __init__(self, argv: list[str], prefix: str = "", output: IO | None = None) -> None:
        """Start ``srun`` with a prefix for its messages; the tasks' output goes to ``output``."""
        self._prefix, self._final = prefix, 0
        # Megatron warns of every optional package it does not find; `qurl show --env` says it once.
        env = {"PYTHONWARNINGS": "ignore", **os.environ}
        try:
            # A session of its own: signals to the supervisor's group must not reach srun.
            self._process = subprocess.Popen(
                argv,
                env=env,
                start_new_session=True,
                stdout=output,
                stderr=subprocess.PIPE,
                errors="replace",
            )
        except OSError as error:
            raise ConfigError(f"{argv[0]} cannot be run: {error}") from None
        self._reader = threading.Thread(target=self._read_messages, daemon=True)
        self._reader.start()

    def _read_messages(self) -> None:
        for line in self._process.stderr or ():
            sys.stderr.write(self._prefix + line)
            sys.stderr.flush()
            self._final = self._final or final_code(line)

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the step's exit code, or None while it runs.

        A rank's final code (2 or 3) wins over those of the ranks that are killed because of it.
        128 + n where ``srun`` was ended by signal n.
        """
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(LISTEN_S)
        if code < 0:
            code = 128 - code
        return self._final or code

    def signal(self, number: int) -> None:
        """Send a signal to its tasks, which ``srun`` passes on."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Kill its tasks, stopped ones too, as ``srun`` does on SIGTERM."""
        self._process.terminate()

    def end_within(self, seconds: float) -> None:
        """Kill its tasks, then ``srun`` itself if it has not ended in time."""
        self.end()
        if self.wait(seconds) is None:
            self._process.kill()
            self.wait()


def final_code(line: str) -> int:
    """Return the exit code in a line of srun's if it is one of ``FINAL``, else 0."""
    for code in FINAL:
        if re.search(rf"tasks? [\d,-]+: Exited with exit code {code}$", line.strip()):
            return code
    return 0


@contextlib.contextmanager
def beside(argv: list[str]) -> Iterator[None]:
    """Run the engines' step beside the ranks, which go on even if it ends."""
    step = SrunStep(argv, ENGINES_PREFIX)
    try:
        yield
    finally:
        step.signal(signal.SIGUSR1)
        if step.wait(ENGINES_S) is None:
            step.end_within(KILL_S)


class StepSupervisor:
    """Watches over the training step of one attempt."""

    def __init__(
        self,
        run_dir: Path,
        attempt: folder.Attempt,
        ranks: int,
        limits: JobConfig,
        received: Received,
    ) -> None:
        """Supervise so many ranks, whose stacks go into the attempt's folder."""
        self.run_dir, self.attempt, self.ranks = run_dir, attempt, ranks
        self.logs = folder.attempt_folder(run_dir, attempt.number)
        self.limits, self.received = limits, received
        self._stop_reason = ""
        self._end = end_of(facts_of(attempt.job))  # operators may move it until the ranks are told
        self._mark, self._stillness = progress_mark(run_dir), Stillness()

    def watch(self, argv: list[str]) -> folder.Attempt:
        """Run the step to its end, and return the attempt with how it ended."""
        step, looked_at, failure = SrunStep(argv), time.monotonic(), ""
        while (code := step.wait(POLL_S)) is None:
            if self.received.newest and not self._stop_reason:
                reason, facts = self.received.newest, facts_of(self.attempt.job)
                if preempted(facts):
                    reason = PREEMPTED
                self._stop_reason, self._end = reason, end_of(facts) or self._end
                say(f"{TAKEN.get(reason, f'SIG{reason}')}: the ranks save and end")
                step.signal(signal.SIGUSR1)
            if not failure and time.monotonic() - looked_at > WATCH_S:
                looked_at = time.monotonic()
                failure = self._stuck(step)
                if failure:
                    step.end()
        reason = self._reason_at_end(failure)
        return replace(self.attempt, code=code, signal=reason, failure=failure)

    def _reason_at_end(self, failure: str) -> str:
        """Return why the ranks were told to end, by us or by somebody else."""
        newest = self.received.newest
        early = self._end is not None and now() < self._end  # later, Slurm sends TERM itself
        if self._stop_reason == WALL_TIME and newest in PERSONS and early:
            return newest  # while they saved, somebody has cancelled the run
        if self._stop_reason or failure:
            return self._stop_reason
        if preempted(facts_of(self.attempt.job)):
            return PREEMPTED  # Slurm tells ranks alone
        return newest

    def _stuck(self, step: SrunStep) -> str:
        """Return why the step has to be ended; "" if it need not."""
        over = self._end is not None and now() > self._end - LAST_S
        if self._stop_reason == WALL_TIME and over:
            return f"the ranks had not ended {LAST_S:.0f} s before the time limit"
        still_s = self._stillness.seconds()
        if (newest_mark := progress_mark(self.run_dir)) != self._mark:
            self._mark = newest_mark
            self._stillness.moved()
            return ""
        if still_s <= self.limits.hung_s:
            return ""
        say(f"no new step for {still_s:.0f} s, where job.hung_s={self.limits.hung_s} are allowed")
        silent_ranks = ask_for_stacks(step, self.logs, self.ranks)
        say(f"the stacks of the ranks are in {self.logs}/stack-RANK.txt")
        for rank in silent_ranks:
            say(f"rank {rank} did not answer: it is stopped, or stuck in the kernel")
        return f"hung: no new step for {still_s:.0f} s"


def progress_mark(run_dir: Path) -> tuple[int, str]:
    """Return a value that changes with every step and with every checkpoint."""
    metrics, size = run_dir / "metrics.jsonl", 0
    if metrics.exists():
        size = metrics.stat().st_size
    return size, str(latest(run_dir))


class Stillness:
    """Time for which a run has not moved, without gaps in which nobody was looking."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._at, self._seconds = clock, clock(), 0.0

    def seconds(self) -> float:
        """Return the seconds up to now; call it at least every ``GLANCE_S``."""
        before, self._at = self._at, self._clock()
        self._seconds += min(self._at - before, GLANCE_S)
        return self._seconds

    def moved(self) -> None:
        """Begin again at the last look."""
        self._seconds = 0.0


def ask_for_stacks(step: SrunStep, logs: Path, ranks: int) -> list[int]:
    """Have every rank write the stacks of all its threads; return the ranks that did not."""
    step.signal(signal.SIGUSR2)
    silent, end = list(range(ranks)), time.monotonic() + STACKS_S
    while silent and time.monotonic() < end:
        time.sleep(POLL_S)
        files = {rank: folder.stack_file(logs, rank) for rank in silent}
        silent = [
            rank for rank, file in files.items() if not (file.exists() and file.stat().st_size)
        ]
    time.sleep(POLL_S)  # the last one may be in the middle of it
    return silent


def end_of(facts: Mapping[str, str]) -> float | None:
    """Return when a job's time is up, in Unix seconds; None if Slurm does not say."""
    return commands.unix_seconds(facts.get("EndTime", ""))


def preempted(facts: Mapping[str, str]) -> bool:
    """Return whether Slurm takes the job's nodes for another job."""
    return facts.get("PreemptTime", "None") != "None"


def facts_of(job: int) -> dict[str, str]:
    """Return Slurm's facts of a job; none while its controller does not answer."""
    try:
        return commands.job_facts(job)
    except ConfigError as error:  # busy controllers come back; the run does not depend on this
        say(f"{error}; the run goes on without that")
        return {}


def say(line: str) -> None:
    print(f"qurl: {line}", flush=True)
