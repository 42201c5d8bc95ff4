"""``qurl study``: run the cells of a study file, several at once, or show how far they are.

A cell is a ``qurl train`` of its own, and then a ``qurl eval`` of the trained policy: the last
checkpoint answers the held-out questions, greedily and unquantized, whereas a run's metrics are of
its rollouts, at their precision.

    OUT/runs/naive-int4-seed-0/    train.run_dir of a cell, whoever started it
      trained/step_000080/         its held-out questions, and the results of ``qurl eval``;
                                   with final_prompts trained_2048/step_000080/
    OUT/logs/naive-int4-seed-0.log
    OUT/logs/naive-int4-seed-0.failed    why the cell has failed
    OUT/.lock                      locked by the study at work in OUT

The evaluation lies in the run's folder: whoever deletes a run deletes its accuracy too.
"""

import argparse
import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qurl_megatron.bench.record import environment
from qurl_megatron.data.questions import held_out_questions
from qurl_megatron.evaluation.study_plan import Cell, Study, read_study, run_dir
from qurl_megatron.evaluation.study_results import (
    BENCHMARK,
    Result,
    failure_file,
    read_result,
    trained_dir,
    write_report,
)
from qurl_megatron.kit.disk import claimed
from qurl_megatron.kit.errors import ConfigError, printable
from qurl_megatron.kit.launch import stopping
from qurl_megatron.observe.text import number, percent
from qurl_megatron.training.state import latest

QURL = (sys.executable, "-m", "qurl_megatron.cli")
POLL_S = 0.1
STATUS = (("reward", "reward/mean", number), ("accuracy", "eval/accuracy", percent))


def run(arguments: argparse.Namespace, qurl: Sequence[str] = QURL) -> int:
    """Run ``qurl study``, or print how far each cell is; tables and pictures take all cells.

    Args:
        qurl: the command whose ``train`` and ``eval`` are called.

    Returns:
        0 when all are done, 1 where some have failed, 128 + n after a stop by signal n, which the
        runs got too, and saved.

    Raises:
        ConfigError: a mistake in the study file, in one of its recipes or in the arguments;
            another study is at work in ``out``.
    """
    out, only, jobs = arguments.out, arguments.only, arguments.jobs
    study = read_study(arguments.study, arguments.overrides)
    cells = [cell for cell in study.cells if fnmatch.fnmatchcase(cell.name, only)]
    if not cells:
        raise ConfigError(
            f"--only {only} matches no cell; they are named like {study.cells[0].name}"
        )
    if jobs < 1:
        raise ConfigError(f"--jobs must be 1 or more, got {jobs}")
    if arguments.status:
        width = max(len(cell.name) for cell in cells)
        for cell in cells:
            print(status(read_result(cell, out), width))
        return 0
    with claimed(out, "a study"):
        machine = environment() if any(next_task(cell, out) for cell in cells) else None
        code = _Runner(study, out, jobs, qurl).run(cells)
    print(write_report(study, out, machine), flush=True)
    return code


def status(result: Result, width: int) -> str:
    """Say how far a cell is, with its last reward and accuracy, or why it has failed."""
    words = [f"{result.cell.name:{width}}  {result.state:7}  {result.step}/{result.cell.steps}"]
    for name, metric, text in STATUS:
        if metric in result.history:
            _, values = result.history[metric]
            words.append(f"{name} {text(values[-1])}")
    return "  ".join([*words, result.reason]).rstrip()


def next_task(cell: Cell, out: Path) -> str:
    """Return "train", "evaluate", or "" where nothing is left to do."""
    result = read_result(cell, out)
    if not result.done:
        return "train"
    # Other engines than embedded ones cannot load a run's checkpoint.
    if not (cell.final_questions and cell.config.rollout.kind.quantizes):
        return ""
    newest = latest(run_dir(out, cell))
    at_last_step = newest is not None and newest.name == trained_dir(out, cell).name
    if at_last_step and result.trained is None:
        return "evaluate"
    return ""


@dataclass(frozen=True)
class _Job:
    cell: Cell
    task: str
    popen: subprocess.Popen
    log: Path
    log_start: int  # where in the log this attempt begins
    started: float

    @property
    def makes(self) -> str:
        """Path of the model that it makes first; empty: it is there, or made by nobody."""
        config = self.cell.config
        missing = config.warmstart.steps > 0 and not Path(config.model.path).exists()
        return config.model.path if missing else ""

    def last_line(self) -> str:
        """Return the last line of its log: why it has failed."""
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            lines = file.read().decode("utf-8", errors="replace").split("\n")
        written = [line.strip() for line in lines if line.strip()]
        written.insert(0, f"exit status {self.popen.returncode}")
        return printable(written[-1])


class _Runner:
    """Inside ``run``, signals go to the runs, and nothing new is started after one."""

    def __init__(self, study: Study, out: Path, jobs: int, qurl: Sequence[str]) -> None:
        self.study, self.out, self.jobs, self.qurl = study, out, jobs, qurl
        self.active: list[_Job] = []
        self.waiting: list[Cell] = []
        self.failed = False
        self.signals: list[int] = []

    def run(self, cells: Sequence[Cell]) -> int:
        for cell in cells:
            if next_task(cell, self.out):
                self.waiting.append(cell)
            else:  # it may have ended while no study was at work
                self._delete_checkpoints(cell)
        if done := len(cells) - len(self.waiting):
            print(f"{done} of {len(cells)} runs are done already", flush=True)
        handlers = {}
        for stop in stopping():
            handlers[stop] = signal.signal(stop, lambda number, _frame: self.signals.append(number))
        try:
            self._work()
        finally:
            self._pass_on(signal.SIGTERM)  # after an error here; else they have ended
            for job in self.active:
                job.popen.wait()
            for stop, handler in handlers.items():
                signal.signal(stop, handler)
        if self.signals:
            print("stopped; start it again to go on", flush=True)
            return 128 + self.signals[0]
        return int(self.failed)

    def _work(self) -> None:
        """Start cells and wait for them, until none is left or a signal came.

        Signals are passed on from here, not from their handler, so that each run gets each signal
        once: a second one would end it unsaved.
        """
        passed_on = 0
        while self.active or (self.waiting and not self.signals):
            for stop in self.signals[passed_on:]:
                self._pass_on(stop)
                passed_on += 1
            for job in [job for job in self.active if job.popen.poll() is not None]:
                self._ended(job)
            while not self.signals and (startable := self._startable()):
                self._start(startable)
            time.sleep(POLL_S)

    def _pass_on(self, stop: int) -> None:
        for job in self.active:
            if job.popen.poll() is None:
                job.popen.send_signal(stop)

    def _startable(self) -> Cell | None:
        """Return the first cell that may start now; of those without their model, one makes it."""
        if len(self.active) >= self.jobs:
            return None
        in_the_making = {job.makes for job in self.active}
        for cell in self.waiting:
            if cell.config.model.path not in in_the_making:
                return cell
        return None

    def _start(self, cell: Cell) -> None:
        self.waiting.remove(cell)
        task = next_task(cell, self.out)
        if task == "evaluate":
            command = _evaluation(cell, self.out, self.qurl)
        else:
            folder = f"train.run_dir={run_dir(self.out, cell)}"
            command = [*self.qurl, "train", str(self.study.recipe), *cell.overrides, folder]
        env = dict(os.environ)
        if self.jobs > 1:  # each of them would take all cores
            processes = self.jobs * cell.config.parallel.world_size
            env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
        failure = failure_file(self.out, cell)
        failure.parent.mkdir(parents=True, exist_ok=True)
        failure.unlink(missing_ok=True)
        log = failure.with_suffix(".log")
        with log.open("ab") as file:
            log_start = file.tell()  # the run moves this place: it writes through the same file
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,  # Ctrl-C comes once, from here
            )
            self.active.append(_Job(cell, task, popen, log, log_start, time.monotonic()))
        print(f"{cell.name}: {task}", flush=True)

    def _ended(self, job: _Job) -> None:
        """Report how a job ended, and queue its cell again if there is more to do."""
        self.active.remove(job)
        cell, result = job.cell, read_result(job.cell, self.out)
        task = next_task(cell, self.out)
        if not task:
            self._delete_checkpoints(cell)
            outcome = f"done in {time.monotonic() - job.started:.0f} s"
        elif self.signals:
            outcome = f"stopped after step {result.step}"
        elif (job.task, task) == ("train", "evaluate"):
            self.waiting.insert(0, cell)
            outcome = "trained"
        else:
            self.failed = True
            reason = result.reason or job.last_line()
            failure_file(self.out, cell).write_text(reason, encoding="utf-8")
            outcome = f"failed after step {result.step}: {reason}"
        print(f"{cell.name}: {outcome}", flush=True)

    def _delete_checkpoints(self, cell: Cell) -> None:
        if not self.study.settings.keep_checkpoints:
            shutil.rmtree(run_dir(self.out, cell) / "checkpoints", ignore_errors=True)


def _evaluation(cell: Cell, out: Path, qurl: Sequence[str]) -> list[str]:
    """Return the ``qurl eval`` command for a trained cell, and write the questions that it asks."""
    config, folder = cell.config, trained_dir(out, cell)
    folder.mkdir(parents=True, exist_ok=True)
    questions = folder / f"{BENCHMARK}.jsonl"
    answers = bool(config.reward.kind)
    with questions.open("w", encoding="utf-8") as file:
        for q in held_out_questions(config.data, cell.final_questions, answers=answers):
            row = {**q.metadata, "prompt": list(q.turns) or q.text, "answer": q.answer}
            file.write(json.dumps(row) + "\n")
    command = [*qurl, "eval", str(questions), "--run", str(run_dir(out, cell))]
    settings = ("data.prompt_key=prompt", "data.answer_key=answer", "quant.scheme=none")
    return [*command, "--out", str(folder), "--k", "1", *settings]
