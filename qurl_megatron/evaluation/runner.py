"""Runs the cells of a study, several at once.

A cell is a ``qurl train`` of its own, which resumes, saves and refuses by itself, and then a ``qurl
eval`` of the trained policy. A run's metrics are of its rollouts, at their precision; one trains
for the last checkpoint, so that answers the held-out questions too, greedily and unquantized.

    OUT/runs/naive-int4-seed-0/    train.run_dir of a cell, whoever started it
      trained/step_000080/         its held-out questions, and the results of ``qurl eval``
    OUT/logs/naive-int4-seed-0.log
    OUT/cells.json                 why cells have failed, by name; "" for those that are running
    OUT/.lock                      locked by the study at work in OUT

The evaluation lies in the run's folder: whoever deletes a run deletes its accuracy too.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qurl_megatron.checkpoints.integrity import RECORD
from qurl_megatron.data.questions import held_out_questions
from qurl_megatron.evaluation.plan import Cell, Study
from qurl_megatron.kit.disk import lock, read_json, write_whole
from qurl_megatron.kit.errors import ConfigError, printable
from qurl_megatron.kit.launch import stopping
from qurl_megatron.observe.history import History
from qurl_megatron.observe.sinks import METRICS_FILE, read_metrics
from qurl_megatron.training.state import STATE, folders, latest, refuse_other_run

QURL = (sys.executable, "-m", "qurl_megatron.cli")
BENCHMARK = "held_out"
POLL_S = 0.1


@dataclass(frozen=True)
class Progress:
    """How far a run is, as its folder shows it."""

    state: Literal["done", "failed", "waiting"]
    history: History | None = None  # up to the last step that the study asks for
    reason: str = ""  # of a failure

    @property
    def step(self) -> int:
        return self.history.last_step if self.history else 0


def run_dir(out: Path, cell: Cell) -> Path:
    return out / "runs" / cell.name


def progress(cell: Cell, out: Path) -> Progress:
    """Read a cell's run folder.

    Done: all steps are measured, and the last one is evaluated where the recipe evaluates. Failed:
    the folder holds a run with other settings, or its metrics are damaged.
    """
    folder = run_dir(out, cell)
    metrics = folder / METRICS_FILE
    if not metrics.is_file() or b"\n" not in metrics.read_bytes():
        return Progress("waiting")
    try:
        changes = refuse_other_run(folder, cell.config)
        if pinned := [change for change in changes if change.rule != "free"]:
            differences = "; ".join(map(str, pinned))
            raise ConfigError(
                f"{folder} holds a run with other settings ({differences}); move it away"
            )
        records = read_metrics(metrics)
    except ConfigError as error:
        return Progress("failed", reason=str(error))
    history = History(record for record in records if record.step <= cell.steps)
    if history.last_step < cell.steps:
        return Progress("waiting", history)
    if cell.config.train.eval_prompts > 0:
        steps = history.series("eval/accuracy")[0] if "eval/accuracy" in history else [0]
        if steps[-1] < cell.steps:
            return Progress("waiting", history)
    return Progress("done", history)


def trained_accuracy(cell: Cell, out: Path) -> float | None:
    """Share of held-out questions that the trained policy answers, or None before it was asked."""
    results = _trained_dir(out, cell) / "results.json"
    if not results.is_file():
        return None
    benchmark = json.loads(results.read_text(encoding="utf-8"))["benchmarks"][BENCHMARK]
    return benchmark["greedy"]["accuracy"]


def next_task(study: Study, cell: Cell, out: Path) -> str:
    """Return "train", "evaluate", or "" where nothing is left to do."""
    if progress(cell, out).state != "done":
        return "train"
    # Other engines than embedded ones cannot load a run's checkpoint, and an embedded one in their
    # place may take hours for a large model: that must be asked for.
    loadable = cell.config.rollout.kind.quantizes or study.settings.trained_by_embedded
    if not (cell.config.train.eval_prompts > 0 and loadable):
        return ""
    newest = latest(run_dir(out, cell))
    at_last_step = newest is not None and newest.name == _last_step(cell)
    return "evaluate" if at_last_step and trained_accuracy(cell, out) is None else ""


def train_command(study: Study, cell: Cell, out: Path, qurl: Sequence[str] = QURL) -> list[str]:
    """The ``qurl train`` of a cell."""
    folder = f"train.run_dir={run_dir(out, cell)}"
    return [*qurl, "train", str(study.recipe), *cell.overrides, folder]


def run(study: Study, cells: Sequence[Cell], out: Path, *, jobs: int, qurl: Sequence[str]) -> int:
    """Bring all ``cells`` to their end.

    Args:
        jobs: how many run at once.
        qurl: the command whose ``train`` and ``eval`` are called.

    Returns:
        0 when all are done, 1 where some have failed, 128 + n after a stop by signal n, which the
        runs got too, and saved.

    Raises:
        ConfigError: another study is at work in ``out``.
    """
    with claim(out):
        return _Runner(study, out, jobs, qurl).run(cells)


def failures(out: Path) -> dict[str, str]:
    """Why cells failed when they last ran, by name."""
    return {name: reason for name, reason in _noted(out).items() if reason}


def running(out: Path) -> set[str]:
    """Names of the cells that a study is working on now."""
    if not at_work(out):
        return set()
    return {name for name, reason in _noted(out).items() if not reason}


@contextlib.contextmanager
def claim(out: Path) -> Iterator[None]:
    """Keep other studies out of the folder until the block ends.

    Raises:
        ConfigError: another study is at work in it.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("a") as file:
        if not lock(file, fcntl.LOCK_EX):
            raise ConfigError(
                f"a study is at work in {out}; wait for it, stop it, or give another --out"
            )
        yield


def at_work(out: Path) -> bool:
    """Return whether a study is at work in ``out``."""
    path = out / ".lock"
    if not path.exists():
        return False
    with path.open() as file:
        return not lock(file, fcntl.LOCK_SH)


@dataclass(frozen=True)
class _Job:
    cell: Cell
    task: str
    popen: subprocess.Popen
    log: Path
    log_start: int  # where in the log this attempt begins
    started: float


class _Runner:
    """Inside ``run``, signals go to the runs, and nothing new is started after one."""

    def __init__(self, study: Study, out: Path, jobs: int, qurl: Sequence[str]) -> None:
        self.study, self.out, self.jobs, self.qurl = study, out, jobs, qurl
        self.active: list[_Job] = []
        self.waiting: list[Cell] = []
        self.notes = failures(out)
        self.failed = False
        self.signals: list[int] = []

    def run(self, cells: Sequence[Cell]) -> int:
        for cell in cells:
            if next_task(self.study, cell, self.out):
                self.waiting.append(cell)
            else:  # it may have ended while no study was at work
                self._empty_checkpoints(cell)
        if done := len(cells) - len(self.waiting):
            print(f"{done} of {len(cells)} runs are done already", flush=True)
        handlers = {}
        for number in stopping():
            handlers[number] = signal.signal(number, lambda n, _frame: self.signals.append(n))
        try:
            self._work()
        finally:
            self._pass_on(signal.SIGTERM)  # after an error here; else they have ended
            for job in self.active:
                job.popen.wait()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self.signals:
            print("stopped; start it again to go on", flush=True)
            return 128 + self.signals[0]
        return int(self.failed)

    def _work(self) -> None:
        """Start cells and see them end, until none is left or a signal came.

        Signals are passed on from here, not from their handler: each run must get each signal once,
        since it takes the second one as "now, unsaved".
        """
        passed_on = 0
        while self.active or (self.waiting and not self.signals):
            for number in self.signals[passed_on:]:
                self._pass_on(number)
                passed_on += 1
            for job in list(self.active):
                if job.popen.poll() is not None:
                    self._ended(job)
            while not self.signals and (startable := self._startable()):
                self._start(startable)
            time.sleep(POLL_S)

    def _pass_on(self, number: int) -> None:
        for job in self.active:
            if job.popen.poll() is None:
                job.popen.send_signal(number)

    def _startable(self) -> Cell | None:
        """The first cell that may start now.

        A model that does not exist yet is made by one run while the others wait for it.
        """
        if len(self.active) >= self.jobs:
            return None
        models_in_the_making = set()
        for job in self.active:
            config = job.cell.config
            if config.warmstart.steps > 0 and not Path(config.model.path).exists():
                models_in_the_making.add(config.model.path)
        for cell in self.waiting:
            if cell.config.model.path not in models_in_the_making:
                return cell
        return None

    def _start(self, cell: Cell) -> None:
        self.waiting.remove(cell)
        overrides, env = share_cores(cell, self.jobs)
        task = next_task(self.study, cell, self.out)
        if task == "evaluate":
            command = _evaluation(cell, self.out, self.qurl)
        else:
            command = [*train_command(self.study, cell, self.out, self.qurl), *overrides]
        log = self.out / "logs" / f"{cell.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**env, **os.environ},
                start_new_session=True,  # Ctrl-C comes once, from here
            )
            self.active.append(_Job(cell, task, popen, log, file.tell(), time.monotonic()))
        self._note(cell, "")
        print(f"{cell.name}: {task}", flush=True)

    def _ended(self, job: _Job) -> None:
        """Report how a job ended, and queue its cell again if there is more to do."""
        self.active.remove(job)
        cell, reason = job.cell, None
        reached = progress(cell, self.out)
        task = next_task(self.study, cell, self.out)
        if not task:
            self._empty_checkpoints(cell)
            outcome = f"done in {time.monotonic() - job.started:.0f} s"
        elif self.signals:
            outcome = f"stopped after step {reached.step}"
        elif (job.task, task) == ("train", "evaluate"):
            self.waiting.insert(0, cell)
            outcome = "trained"
        else:
            self.failed = True
            reason = reached.reason or _last_line(job) or f"exit status {job.popen.returncode}"
            outcome = f"failed after step {reached.step}: {reason}"
        self._note(cell, reason)
        print(f"{cell.name}: {outcome}", flush=True)

    def _empty_checkpoints(self, cell: Cell) -> None:
        """Delete the weights of a finished run, if the study says so.

        Each checkpoint's state and list of files stay: they tell which run it was, and that it is
        not whole.
        """
        if self.study.settings.keep_checkpoints:
            return
        for checkpoint in folders(run_dir(self.out, cell)):
            for path in checkpoint.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name not in (STATE, RECORD):
                    path.unlink()

    def _note(self, cell: Cell, reason: str | None) -> None:
        """Remember that a cell is running (""), has failed (why), or neither (None)."""
        self.notes.pop(cell.name, None)
        if reason is not None:
            self.notes[cell.name] = reason
        write_whole(self.out / "cells.json", json.dumps(self.notes, indent=1))


def share_cores(cell: Cell, jobs: int) -> tuple[list[str], dict[str, str]]:
    """Overrides and environment with which ``jobs`` runs share the cores of this machine.

    A run alone is left as ``qurl train`` would have it, and so is the number of threads that the
    recipe or the environment sets.
    """
    if jobs == 1:
        return [], {}
    rollout = cell.config.rollout
    cores = max(1, (os.cpu_count() or 1) // jobs)
    overrides = []
    if not rollout.engine_threads:
        overrides.append(f"rollout.engine_threads={max(1, cores // rollout.engines)}")
    ranks = cell.config.parallel.world_size
    return overrides, {"OMP_NUM_THREADS": str(max(1, cores // ranks))}


def _evaluation(cell: Cell, out: Path, qurl: Sequence[str]) -> list[str]:
    """The ``qurl eval`` of a trained cell; writes the questions it asks."""
    config, folder = cell.config, _trained_dir(out, cell)
    folder.mkdir(parents=True, exist_ok=True)
    questions = folder / f"{BENCHMARK}.jsonl"
    answers = config.reward.needs_answers
    with questions.open("w", encoding="utf-8") as file:
        for q in held_out_questions(config.data, config.train.eval_prompts, answers=answers):
            row = {**q.metadata, "prompt": list(q.turns) or q.text, "answer": q.answer}
            file.write(json.dumps(row) + "\n")
    command = [*qurl, "eval", str(questions), "--prompt-key", "prompt", "--answer-key", "answer"]
    command += ["--run", str(run_dir(out, cell)), "--out", str(folder)]
    if not config.rollout.kind.quantizes:
        command += ["--backend", "embedded", "--engines", "1"]
    return [*command, "--scheme", "none", "--k", "1"]


def _trained_dir(out: Path, cell: Cell) -> Path:
    return run_dir(out, cell) / "trained" / _last_step(cell)


def _last_step(cell: Cell) -> str:
    return f"step_{cell.steps:06d}"


def _noted(out: Path) -> dict[str, str]:
    """Read OUT/cells.json.

    Raises:
        ConfigError: the file is damaged.
    """
    path = out / "cells.json"
    if not path.is_file():
        return {}
    notes = read_json(path)
    for name, reason in notes.items():
        if not isinstance(reason, str):
            raise ConfigError(f"{path}: {name} has no reason in words; delete the file")
    return {name: printable(reason) for name, reason in notes.items()}


def _last_line(job: _Job) -> str:
    with job.log.open("rb") as file:
        file.seek(job.log_start)
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    for line in reversed(lines):
        if line.strip():
            return printable(line.strip())
    return ""
