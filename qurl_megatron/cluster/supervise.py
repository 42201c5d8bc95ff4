"""The training step while it runs: tell its ranks when to end, and end those that never will.

Whatever signal Slurm sends, the ranks get SIGUSR1 through ``srun`` (``task`` says why): they finish
or drop their step, save, and end. Slurm's own signal comes at ``job.signal_s``, which is a guess;
once the run has shown how long its steps and checkpoints take, ranks are told just in time.
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
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

from qurl_megatron.cluster import commands, folder
from qurl_megatron.cluster.cluster import JobConfig
from qurl_megatron.cluster.layout import ENGINES_PREFIX
from qurl_megatron.cluster.pace import Pace, Stillness, due, measured, progress_mark
from qurl_megatron.cluster.verdict import FINAL, PERSONS, PREEMPTED, TAKEN, WALL_TIME
from qurl_megatron.kit.clock import now
from qurl_megatron.kit.errors import ConfigError

POLL_S = 0.5
WATCH_S = 2.0
"""Between looks at the run's files."""
LAST_S = 20.0
"""Before the time limit in which ranks that have not ended are ended: a job that runs into its
limit is not requeued."""
LISTEN_S = 5.0
"""For the last lines of a step that has ended; a process that it left may hold its output open."""
STACKS_S = 5.0
"""Time for ranks to write their stacks."""
ENGINES_S = 30.0
"""Time for engines on nodes of their own to leave."""
REQUEUE_S = 10.0
"""Before the time limit by which all of a job has ended or been killed, to have it requeued."""


class Received:
    """Inside, notes signals in place of ending this process."""

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


# ---- a step of the job


class SrunStep:
    """A running ``srun``; its messages go on to the log and are read for exit codes."""

    def __init__(self, argv: list[str], prefix: str = "", *, capture: bool = False) -> None:
        """
        Args:
            prefix: goes before each of its messages.
            capture: keep the tasks' output in ``output``.
        """
        self.output: list[str] = []
        self._prefix, self._final = prefix, 0
        # Megatron warns of every optional package it does not find; `qurl show --env` says it once.
        env = {"PYTHONWARNINGS": "ignore", **os.environ}
        try:
            # A session of its own: signals to the supervisor's group must not reach srun.
            self._process = subprocess.Popen(
                argv,
                env=env,
                start_new_session=True,
                stdout=subprocess.PIPE if capture else None,
                stderr=subprocess.PIPE,
                errors="replace",
            )
        except OSError as error:
            raise ConfigError(f"{argv[0]} cannot be run: {error}") from None
        self._readers = [self._reading(self._process.stderr, self._message)]
        if capture:
            self._readers.append(self._reading(self._process.stdout, self.output.append))

    def _reading(self, lines: IO[str] | None, use: Callable[[str], None]) -> threading.Thread:
        assert lines is not None

        def read() -> None:
            for line in lines:
                use(line)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        return reader

    def _message(self, line: str) -> None:
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
        for reader in self._readers:
            reader.join(LISTEN_S)
        return self._final or (code if code >= 0 else 128 - code)

    def signal(self, number: int) -> None:
        """Send a signal to its tasks, which ``srun`` passes on."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Kill its tasks, stopped ones too, as ``srun`` does on SIGTERM."""
        self._process.terminate()

    def end_within(self, seconds: float) -> None:
        """Kill its tasks, then ``srun`` itself where it has not ended in time."""
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
def beside(argv: list[str], patience_s: Callable[[], float]) -> Iterator[None]:
    """Run the engines' step while the ranks run. Its end is no reason to end: engines may go.

    Args:
        patience_s: asked once the ranks have ended: seconds in which the engines must leave.
    """
    step = SrunStep(argv, ENGINES_PREFIX)
    try:
        yield
    finally:
        step.signal(signal.SIGUSR1)
        if step.wait(patience_s()) is None:
            step.end_within(REQUEUE_S)


# ---- when to end


def spare_s(end: float | None, at: float) -> float:
    """Return the seconds in which engines must leave.

    Args:
        end: when the job's time is up, Unix seconds; None: not known.
        at: now.
    """
    if end is None:
        return ENGINES_S
    return max(0.0, min(ENGINES_S, end - at - REQUEUE_S))


@dataclass(frozen=True)
class Ending:
    """How the training step ended."""

    code: int
    stop_reason: str = ""  # why its ranks were told to end; see ``verdict.decide``
    failure: str = ""  # why the supervisor ended it
    at: float = 0.0  # when, Unix seconds; 0: now


@dataclass
class StepSupervisor:
    """Watches over one training step."""

    run_dir: Path
    logs: Path  # of the attempt
    job: int
    ranks: int
    limits: JobConfig
    received: Received
    _stop_reason: str = ""
    _heard: str = ""

    def __post_init__(self) -> None:
        self._began, self._still = now(), Stillness()
        self._mark, self._pace = progress_mark(self.run_dir), self._measured()
        self._end = end_of(facts_of(self.job))

    def watch(self, argv: list[str]) -> Ending:
        """Run the step to its end."""
        step, looked_at, failure = SrunStep(argv), time.monotonic(), ""
        while (code := step.wait(POLL_S)) is None:
            still_s = self._still.seconds()
            if not failure and time.monotonic() - looked_at > WATCH_S:
                looked_at = time.monotonic()
                failure = self._stuck(step, still_s)
                if failure:
                    step.end()
            if not self._stop_reason and (reason := self._due()):
                self._stop_reason = reason
                say(f"{TAKEN.get(reason, f'SIG{reason}')}: the ranks save and end")
                step.signal(signal.SIGUSR1)
        return Ending(code, self._reason_at_end(code, failure), failure)

    def _reason_at_end(self, code: int, failure: str) -> str:
        """Return why the ranks were told to end, by us or by somebody else."""
        newest = self.received.newest
        if self._stop_reason == WALL_TIME and newest in PERSONS:
            # While they saved, somebody has cancelled the run; at the end Slurm sends TERM itself.
            early = self._end is not None and now() < self._end
            return newest if early else WALL_TIME
        if self._stop_reason or failure:
            return self._stop_reason
        if preempted(facts_of(self.job)):  # Slurm tells the ranks alone
            return PREEMPTED
        # Slurm's signal that was put off is no reason for a failure.
        return "" if code and newest == WALL_TIME else newest

    def _due(self) -> str:
        """Return why the ranks are to be told now.

        Operators raise limits, and preemption cuts them short: Slurm is asked when it matters.
        """
        heard = self.received.newest
        if heard == self._heard and not self._due_now(heard):
            return ""
        facts = facts_of(self.job)
        self._end = end_of(facts) or self._end
        reason = self._due_now(heard, preempted=bool(heard) and preempted(facts))
        if heard != self._heard and not reason:
            assert self._end is not None and self._pace.stop_s is not None, "else it is heeded"
            left_s, needed_s = self._end - now(), self._pace.stop_s
            say(f"SIG{heard} {left_s:.0f} s before the end; {needed_s:.0f} are needed, it goes on")
        self._heard = heard
        return reason

    def _due_now(self, received: str, *, preempted: bool = False) -> str:
        stop_s, signal_s = self._pace.stop_s, self.limits.signal_s
        return due(
            now(), received, end=self._end, stop_s=stop_s, signal_s=signal_s, preempted=preempted
        )

    def spare_s(self) -> float:
        """Return ``spare_s`` of this job."""
        self._ask_for_end()
        return spare_s(self._end, now())

    def _over(self) -> bool:
        """The job is about to run into its limit, which moves while a job is suspended."""
        if self._end is None or now() <= self._end - LAST_S:
            return False
        self._ask_for_end()
        return now() > self._end - LAST_S

    def _ask_for_end(self) -> None:
        self._end = end_of(facts_of(self.job)) or self._end

    def _measured(self) -> Pace:
        return measured(self.run_dir, self._began).without_pauses(self.limits)

    def _stuck(self, step: SrunStep, still_s: float) -> str:
        """Return why the step has to be ended; "" where it need not.

        Args:
            still_s: seconds since the run has moved, by the last look.
        """
        if self._stop_reason == WALL_TIME and self._over():
            return f"the ranks had not ended {LAST_S:.0f} s before the time limit"
        if (newest_mark := progress_mark(self.run_dir)) != self._mark:
            self._mark, self._pace = newest_mark, self._measured()
            self._still.moved()
            return ""
        patience_s = self._pace.patience_s(self.limits)
        if still_s <= patience_s:
            return ""
        say(f"no new step for {still_s:.0f} s, where {patience_s:.0f} are allowed (job.hung_s)")
        silent_ranks = ask_for_stacks(step, self.logs, self.ranks)
        say(f"the stacks of the ranks are in {self.logs}/stack-RANK.txt")
        for rank in silent_ranks:
            say(f"rank {rank} did not answer: it is stopped, or stuck in the kernel")
        return f"hung: no new step for {still_s:.0f} s"


def ask_for_stacks(step: SrunStep, logs: Path, ranks: int) -> list[int]:
    """Have every rank write the stacks of all its threads.

    Returns:
        The ranks that have written nothing.
    """
    step.signal(signal.SIGUSR2)
    silent, end = list(range(ranks)), time.monotonic() + STACKS_S
    while silent and time.monotonic() < end:
        time.sleep(POLL_S)
        silent = [rank for rank in silent if not _has_text(folder.stack_file(logs, rank))]
    time.sleep(POLL_S)  # the last one may be in the middle of it
    return silent


def _has_text(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


# ---- facts of the job


def end_of(facts: Mapping[str, str]) -> float | None:
    """Return when a job's time is up, in Unix seconds; None where Slurm does not say."""
    with contextlib.suppress(KeyError, ValueError):  # Unknown, or no answer
        return datetime.fromisoformat(facts["EndTime"]).timestamp()  # local time, as Slurm writes
    return None


def preempted(facts: Mapping[str, str]) -> bool:
    """Slurm takes the job's nodes for another one."""
    return facts.get("PreemptTime", "None") != "None"


def facts_of(job: int) -> dict[str, str]:
    """Return Slurm's facts of a job; none while its controller does not answer."""
    try:
        return commands.job_facts(job)
    except ConfigError as error:  # busy controllers come back; the run goes on without its word
        say(f"{error}; the run goes on without that")
        return {}


def say(line: str) -> None:
    print(f"qurl: {line}", flush=True)
