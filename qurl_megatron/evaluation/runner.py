"""Runs the cells of a study, several at once, and remembers what became of each.

Every cell is a ``qurl train`` of its own, which resumes, saves and refuses by itself, and then a
``qurl eval`` of what it has trained. What is kept here is small:

    OUT/study.pid    the process at work in OUT, which holds a lock on the file
    OUT/cells.json   why cells have failed, by name; "" for those that run. Whether a cell is done,
                     its own metrics say.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from qurl_megatron.evaluation.greedy_accuracy import due, empty_checkpoints, evaluation
from qurl_megatron.evaluation.plan import Cell, Study
from qurl_megatron.evaluation.runs import log_file, look, run_dir
from qurl_megatron.kit.disk import lock, read_json, write_whole
from qurl_megatron.kit.errors import ConfigError, printable
from qurl_megatron.kit.launch import stopping

QURL = (sys.executable, "-m", "qurl_megatron.cli")
PID_FILE = "study.pid"
STARTED = {"train": "started", "evaluate": "trained, its policy is evaluated unquantized"}
POLL_S = 0.1
CLAIM_S = 1.0  # a look at the lock holds it for a moment


@dataclass(frozen=True)
class CellJob:
    """One cell at work."""

    cell: Cell
    task: str  # train or evaluate
    popen: subprocess.Popen
    log: Path
    log_start: int  # where in the log this attempt begins
    started: float


def task_of(study: Study, cell: Cell, out: Path) -> str:
    """What is to be done for a cell next: "train", "evaluate", or "" where all is done."""
    if look(study, cell, out).state != "done":
        return "train"
    return "evaluate" if due(study, cell, out) else ""


def command(study: Study, cell: Cell, out: Path, qurl: Sequence[str] = QURL) -> list[str]:
    """The ``qurl train`` of one cell."""
    return [
        *qurl,
        "train",
        str(study.recipe),
        *cell.overrides,
        f"train.run_dir={run_dir(out, cell)}",
    ]


def run(
    study: Study,
    cells: Sequence[Cell],
    out: Path,
    *,
    jobs: int,
    redraw: Callable[[], None],
    qurl: Sequence[str] = QURL,
) -> int:
    """Bring all ``cells`` to their end.

    Args:
        jobs: how many run at once.
        redraw: called after each cell that is done.
        qurl: the command whose ``train`` and ``eval`` are called.

    Returns:
        0 when all are done, 1 where some have failed, 128 + n after a stop by signal n, which the
        runs got too, and saved.

    Raises:
        ConfigError: another study is at work in ``out``.
    """
    with claim(out):
        return _Runner(study, out, jobs, qurl, redraw).run(cells)


def failures(out: Path) -> dict[str, str]:
    """Why cells have failed when they last ran, by name."""
    return {name: reason for name, reason in _read(out).items() if reason}


def running(out: Path) -> set[str]:
    """Names of the cells that a study is at work on now; empty where none is."""
    if not at_work(out):
        return set()
    return {name for name, reason in _read(out).items() if not reason}


@contextlib.contextmanager
def claim(out: Path) -> Iterator[None]:
    """Inside, the folder is this process' own.

    Raises:
        ConfigError: another study is at work in it.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / PID_FILE).open("a") as file:
        end = time.monotonic() + CLAIM_S
        while not lock(file, fcntl.LOCK_EX):
            if time.monotonic() > end:
                raise ConfigError(
                    f"a study is at work in {out}; wait for it, stop it, or give another --out"
                )
            time.sleep(POLL_S)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def at_work(out: Path) -> int | None:
    """The process of the study that is at work in ``out``; None where none is."""
    path = out / PID_FILE
    if not path.exists():
        return None
    with path.open() as file:
        if lock(file, fcntl.LOCK_SH):
            return None
        return int(file.read() or 0) or None  # it is written right after the lock is taken


class _Runner:
    """Inside ``run``, signals go to the runs, and nothing new is started after one."""

    def __init__(
        self,
        study: Study,
        out: Path,
        jobs: int,
        qurl: Sequence[str],
        redraw: Callable[[], None],
    ) -> None:
        self.study = study
        self.out = out
        self.jobs = jobs
        self.qurl = qurl
        self.redraw = redraw
        self.at_work: list[CellJob] = []
        self.reasons = failures(out)
        self.failed: list[Cell] = []
        self.signals: list[int] = []

    def run(self, cells: Sequence[Cell]) -> int:
        self.waiting = waiting = [cell for cell in cells if task_of(self.study, cell, self.out)]
        self.total, self.done = len(cells), len(cells) - len(waiting)
        for cell in cells:
            if cell not in waiting:  # it may have ended while no study was at work
                self._tidy(cell)
        if self.done:
            print(f"{self.done} of {self.total} runs are done already", flush=True)
        # Passed on by the loop, not from within the handler: each run must get each signal once,
        # since it takes the second one as "now, unsaved".
        handlers = {
            number: signal.signal(number, lambda number, _frame: self.signals.append(number))
            for number in stopping()
        }
        passed_on = 0
        try:
            while self.at_work or (waiting and not self.signals):
                for number in self.signals[passed_on:]:
                    self._pass_on(number)
                    passed_on += 1
                ended = [job for job in self.at_work if job.popen.poll() is not None]
                news = [self._ended(job) for job in ended]
                while not self.signals and (first := self._next(waiting)):
                    waiting.remove(first)
                    self._start(first)
                if any(news):
                    self.redraw()  # while the next ones run
                time.sleep(POLL_S)
        finally:
            self._pass_on(signal.SIGTERM)  # after an error here; else they have ended
            for job in self.at_work:
                job.popen.wait()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self.signals:
            print("stopped; start it again to go on", flush=True)
            return 128 + self.signals[0]
        return 1 if self.failed else 0

    def _pass_on(self, number: int) -> None:
        for job in self.at_work:
            if job.popen.poll() is None:
                job.popen.send_signal(number)

    def _next(self, waiting: Sequence[Cell]) -> Cell | None:
        """The first cell that may start now.

        A model that does not exist yet is made by one run while the others wait for it.
        """
        if len(self.at_work) >= self.jobs:
            return None
        models_in_the_making = {job.cell.model_path for job in self.at_work if job.cell.warmstarted}
        for cell in waiting:
            if cell.model_path not in models_in_the_making or cell.model_path.exists():
                return cell
        return None

    def _start(self, cell: Cell) -> None:
        shared, env = share(cell, self.jobs)
        task = task_of(self.study, cell, self.out)
        if task == "evaluate":
            called = evaluation(self.study, cell, self.out, self.qurl)
        else:
            called = [*command(self.study, cell, self.out, self.qurl), *shared]
        log = log_file(self.out, cell)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            popen = subprocess.Popen(
                called,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**env, **os.environ},
                start_new_session=True,  # Ctrl-C comes once, from here
            )
            job = CellJob(cell, task, popen, log, file.tell(), time.monotonic())
        self.at_work.append(job)
        self._note(cell, "")
        print(f"{cell.name}: {STARTED[task]}", flush=True)

    def _ended(self, job: CellJob) -> bool:
        """Say how it ended; True where there is something to draw."""
        self.at_work.remove(job)
        cell = job.cell
        run_look = look(self.study, cell, self.out)
        open_task = task_of(self.study, cell, self.out)
        if not open_task:
            self.done += 1
            self._tidy(cell)
            self._note(cell, None)
            took = time.monotonic() - job.started
            print(
                f"{cell.name}: done in {took:.0f} s ({self.done} of {self.total} runs)", flush=True
            )
        elif self.signals:
            self._note(cell, None)
            print(f"{cell.name}: stopped after step {run_look.step}", flush=True)
        elif (job.task, open_task) == ("train", "evaluate"):
            self._note(cell, None)
            self.waiting.insert(0, cell)
        else:
            reason = run_look.reason or _last_line(job) or f"exit status {job.popen.returncode}"
            self.failed.append(cell)
            self._note(cell, reason)
            print(f"{cell.name}: failed after step {run_look.step}: {reason}", flush=True)
        return run_look.state == "done"

    def _tidy(self, cell: Cell) -> None:
        """Nothing is left to be done for this cell."""
        if not self.study.settings.keep_checkpoints:
            empty_checkpoints(run_dir(self.out, cell))

    def _note(self, cell: Cell, reason: str | None) -> None:
        """Remember that a cell runs (""), has failed (why), or neither (None)."""
        self.reasons.pop(cell.name, None)
        if reason is not None:
            self.reasons[cell.name] = reason
        write_whole(self.out / "cells.json", json.dumps(self.reasons, indent=1))


def share(cell: Cell, jobs: int) -> tuple[list[str], dict[str, str]]:
    """Overrides and environment with which ``jobs`` runs share the cores of this machine.

    A run alone is left as ``qurl train`` would have it; so is what the recipe or the environment
    says of threads itself.
    """
    if jobs == 1:
        return [], {}
    cores = max(1, (os.cpu_count() or 1) // jobs)
    threads = max(1, cores // cell.engines)
    overrides = [] if cell.engine_threads else [f"rollout.engine_threads={threads}"]
    return overrides, {"OMP_NUM_THREADS": str(max(1, cores // cell.ranks))}


def _read(out: Path) -> dict[str, str]:
    """Read why cells have failed, by name.

    Raises:
        ConfigError: the file is damaged.
    """
    path = out / "cells.json"
    if not path.is_file():
        return {}
    reasons = read_json(path)
    for name, reason in reasons.items():
        if not isinstance(reason, str):
            raise ConfigError(f"{path}: {name} has no reason in words; delete the file")
    # Older studies wrote ``Cell.old_name``.
    return {
        name.replace(",", "-").replace("=", "-"): printable(reason)
        for name, reason in reasons.items()
    }


def _last_line(job: CellJob) -> str:
    with job.log.open("rb") as file:
        file.seek(job.log_start)
        lines = file.read().decode("utf-8", errors="replace").split("\n")
    return printable(next((line.strip() for line in reversed(lines) if line.strip()), ""))
