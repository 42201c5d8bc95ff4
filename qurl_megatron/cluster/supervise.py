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

from qurl_megatron.cluster import commands, folder
from qurl_megatron.cluster.cluster import JobConfig
from qurl_megatron.cluster.pace import Pace, Stillness, mark, measured
from qurl_megatron.cluster.steps import ENGINES_SAY
from qurl_megatron.cluster.verdict import FINAL, PERSONS, PREEMPTED, TAKEN, WALL_TIME
from qurl_megatron.kit.clock import now
from qurl_megatron.kit.errors import ConfigError

POLL_S = 0.5
WATCH_S = 2.0
"""Between looks at the run's files."""
EARLY_S = 60.0
"""By which Slurm's signal may be early."""
LAST_S = 20.0
"""Before the time limit in which ranks that have not ended are ended: a job that runs into its
limit is not requeued."""
STACKS_S = 5.0
"""That ranks may take to write their stacks."""
ENGINES_S = 30.0
"""That engines on nodes of their own may take to leave."""
REQUEUE_S = 10.0
"""Before the time limit by which all of a job has ended or been killed, to have it requeued."""


@dataclass(frozen=True)
class Ending:
    """How the training step ended."""

    code: int
    told: str = ""  # why its ranks were told to end; see ``verdict``
    failed: str = ""  # why the supervisor ended it
    at: float = 0.0  # when, Unix seconds; 0: now


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


class SrunStep:
    """A running ``srun``, whose own words go on to the log and are listened to."""

    def __init__(self, argv: list[str], prefix: str = "") -> None:
        """
        Args:
            prefix: goes before each of its lines.
        """
        self._prefix = prefix
        # Megatron warns of every optional package it does not find; `qurl show --env` says it once.
        env = {"PYTHONWARNINGS": "ignore", **os.environ}
        try:
            # A session of its own: what is sent to the supervisor's group must not reach srun.
            self._process = subprocess.Popen(
                argv, env=env, start_new_session=True, stderr=subprocess.PIPE, errors="replace"
            )
        except OSError as error:
            raise ConfigError(f"{argv[0]} cannot be run: {error}") from None
        self._final = 0
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            sys.stderr.write(self._prefix + line)
            sys.stderr.flush()
            self._final = self._final or final_code(line)

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit code once it has ended; that of a rank whose code is final goes before those of
        the others, which are killed then. 128 + n where ``srun`` was ended by signal n. None: it
        runs on."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._listener.join(POLL_S)
        return self._final or (code if code >= 0 else 128 - code)

    def signal(self, number: int) -> None:
        """Send a signal to its tasks, which ``srun`` passes on."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Kill its tasks, stopped ones too: that is what ``srun`` does on SIGTERM."""
        self._process.terminate()


def final_code(line: str) -> int:
    """The exit code in a line of srun's if it is one of ``FINAL``, else 0."""
    match = re.search(r"tasks? [\d,-]+: Exited with exit code (\d+)$", line.strip())
    code = int(match[1]) if match else 0
    return code if code in FINAL else 0


@contextlib.contextmanager
def beside(argv: list[str], patience_s: Callable[[], float]) -> Iterator[None]:
    """Run the engines' step while the ranks run. Its end is no reason to end: engines may go.

    Args:
        patience_s: asked once the ranks have ended, how many seconds the engines have to leave.
    """
    step = SrunStep(argv, ENGINES_SAY)
    try:
        yield
    finally:
        step.signal(signal.SIGUSR1)
        if step.wait(patience_s()) is None:
            step.end()
            step.wait()


def spare_s(end: float | None, at: float) -> float:
    """Seconds that engines have to leave, of a job whose time is up at ``end``, in Unix seconds."""
    return ENGINES_S if end is None else max(0.0, min(ENGINES_S, end - at - REQUEUE_S))


@dataclass(frozen=True)
class Times:
    """What decides when ranks are told to end. Unix seconds; None where it is not known."""

    end: float | None  # of the job
    stop_s: float | None  # that step, save and goodbyes take
    signal_s: float  # before the end, at which Slurm sends its signal

    def due(self, at: float, received: str, *, preempted: bool = False) -> str:
        """Why the ranks must be told to end now; "" where they need not yet.

        Slurm's signal before the time limit is put off where less time is needed. One that comes
        at another time is somebody's, and is heeded at once.
        """
        last = None if self.end is None or self.stop_s is None else self.end - self.stop_s
        if preempted:
            return PREEMPTED
        if received and received != WALL_TIME:
            return received
        if last is not None and at >= last:
            return WALL_TIME
        slurms = self.end is not None and at >= self.end - self.signal_s - EARLY_S
        return "" if last is not None and slurms else received


@dataclass
class StepSupervisor:
    """Watches over one training step."""

    run_dir: Path
    logs: Path  # of the attempt
    job: int
    ranks: int
    limits: JobConfig
    received: Received
    _told: str = ""
    _heard: str = ""

    def __post_init__(self) -> None:
        self._began, self._still = now(), Stillness()
        self._mark, self._pace = mark(self.run_dir), self._measured()
        self._end = end_of(facts_of(self.job))

    def watch(self, argv: list[str]) -> Ending:
        """Run the step to its end."""
        step, looked, failed = SrunStep(argv), time.monotonic(), ""
        while (code := step.wait(POLL_S)) is None:
            still = self._still.seconds()
            if not failed and time.monotonic() - looked > WATCH_S:
                looked = time.monotonic()
                if failed := self._stuck(step, still):
                    step.end()
            if not self._told and (reason := self._due()):
                self._told = reason
                say(f"{TAKEN.get(reason, f'SIG{reason}')}: the ranks save and end")
                step.signal(signal.SIGUSR1)
        stop_reason = self._told or ("" if failed else self._untold(code))
        early = self._end is not None and now() < self._end  # at the end Slurm sends TERM itself
        if self._told == WALL_TIME and self.received.newest in PERSONS and early:
            stop_reason = self.received.newest  # while they saved, somebody has cancelled the run
        return Ending(code, stop_reason, failed)

    def _untold(self, code: int) -> str:
        """Why the ranks have ended that were not told to here."""
        heard = self.received.newest
        if preempted(facts_of(self.job)):  # Slurm tells the ranks alone
            return PREEMPTED
        # Slurm's signal that was put off is no reason for a failure.
        return "" if code and heard == WALL_TIME else heard

    def _due(self) -> str:
        """Why the ranks are to be told now. Limits are raised by operators, and cut short by
        preemption: Slurm is asked when it matters."""
        heard = self.received.newest
        if heard == self._heard and not self._times().due(now(), heard):
            return ""
        facts = facts_of(self.job)
        self._end = end_of(facts) or self._end
        reason = self._times().due(now(), heard, preempted=bool(heard) and preempted(facts))
        if heard != self._heard and not reason:
            assert self._end is not None and self._pace.stop_s is not None, "else it is heeded"
            seconds_left, needed = self._end - now(), self._pace.stop_s
            say(
                f"SIG{heard} {seconds_left:.0f} s before the end; {needed:.0f} are needed, "
                "it goes on"
            )
        self._heard = heard
        return reason

    def spare_s(self) -> float:
        """``spare_s`` of this job, which is asked for its end again where that seems near."""
        if spare_s(self._end, now()) < ENGINES_S:
            self._end = end_of(facts_of(self.job)) or self._end
        return spare_s(self._end, now())

    def _over(self) -> bool:
        """The job is about to run into its limit, which moves while a job is suspended."""
        if self._end is None or now() <= self._end - LAST_S:
            return False
        self._end = end_of(facts_of(self.job)) or self._end
        return now() > self._end - LAST_S

    def _times(self) -> "Times":
        return Times(self._end, self._pace.stop_s, self.limits.signal_s)

    def _measured(self) -> Pace:
        pace = measured(self.run_dir, self._began)
        return pace.without_pauses(self.limits.hung_s, self.limits.hung_steps)

    def _stuck(self, step: SrunStep, still: float) -> str:
        """Why the step has to be ended; "" where it need not.

        Args:
            still: seconds since the run has moved, by the last look.
        """
        if self._told == WALL_TIME and self._over():
            return f"the ranks had not ended {LAST_S:.0f} s before the time limit"
        if (newest_mark := mark(self.run_dir)) != self._mark:
            self._mark, self._pace = newest_mark, self._measured()
            self._still.moved()
            return ""
        patience = self._pace.patience_s(self.limits.hung_s, self.limits.hung_steps)
        if still <= patience:
            return ""
        say(f"no new step for {still:.0f} s, where {patience:.0f} are allowed (job.hung_s)")
        silent = ask_for_stacks(step, self.logs, self.ranks)
        say(f"the stacks of the ranks are in {self.logs}/stack-RANK.txt")
        for rank in silent:
            say(f"rank {rank} did not answer: it is stopped, or stuck in the kernel")
        return f"hung: no new step for {still:.0f} s"


def ask_for_stacks(step: SrunStep, logs: Path, ranks: int) -> list[int]:
    """Have every rank write what all its threads are doing.

    Returns:
        The ranks that have written nothing.
    """
    step.signal(signal.SIGUSR2)
    end = time.monotonic() + STACKS_S
    while (silent := _silent(logs, ranks)) and time.monotonic() < end:
        time.sleep(POLL_S)
    time.sleep(POLL_S)  # the last one may be in the middle of it
    return silent


def _silent(logs: Path, ranks: int) -> list[int]:
    files = ((rank, folder.stack_file(logs, rank)) for rank in range(ranks))
    return [rank for rank, file in files if not (file.exists() and file.stat().st_size)]


def end_of(facts: Mapping[str, str]) -> float | None:
    """When a job's time is up, in Unix seconds; None where Slurm does not say."""
    with contextlib.suppress(KeyError, ValueError):  # Unknown, or no answer
        return datetime.fromisoformat(facts["EndTime"]).timestamp()  # local time, as Slurm writes
    return None


def preempted(facts: Mapping[str, str]) -> bool:
    """Slurm takes the job's nodes for another one."""
    return facts.get("PreemptTime", "None") != "None"


def facts_of(job: int) -> dict[str, str]:
    """What Slurm says of a job; nothing while its controller does not answer."""
    try:
        return commands.job_facts(job)
    except ConfigError as error:  # busy controllers come back; the run goes on without its word
        say(f"{error}; the run goes on without that")
        return {}


def say(line: str) -> None:
    print(f"qurl: {line}", flush=True)
