"""``qurl study``: run, run in the background, or only look."""

import fnmatch
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qurl_megatron.bench.environment import environment
from qurl_megatron.evaluation.findings import write_report
from qurl_megatron.evaluation.finished import Result, read_results
from qurl_megatron.evaluation.plan import Cell, Study, read_study
from qurl_megatron.evaluation.runner import QURL, at_work, command, run, task_of
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import refusing
from qurl_megatron.observe.text import number, percent

STYLES = {
    "done": "green",
    "running": "yellow",
    "evaluating": "yellow",
    "failed": "red",
    "waiting": "",
}
REDRAW_S = 60.0  # between two drawings while runs are at work; one takes some seconds
START_S = 60.0  # a study in the background may take to claim its folder


def main(
    file: Path,
    out: Path,
    *,
    jobs: int = 1,
    only: str = "*",
    mode: str | None = None,
    overrides: Sequence[str] = (),
    qurl: Sequence[str] = QURL,
) -> int:
    """
    Args:
        overrides: ``section.key=value`` for every run; what a method says itself wins.
        only: pattern of the names of cells to run or list; tables and pictures take all.
        mode: "background", "dry_run", "status" or "report"; None runs here.

    Returns:
        0, or what ``runner.run`` says.

    Raises:
        ConfigError: a mistake in the study file, in one of its recipes or in the arguments.
    """
    study = read_study(file, overrides)
    cells = matching(study, only)
    if jobs < 1:
        raise ConfigError(f"--jobs must be 1 or more, got {jobs}")
    if mode == "dry_run":
        for result in read_results(study, out, cells):
            print(f"{result.state:11}{shlex.join(command(study, result.cell, out, qurl))}")
        return 0
    if mode == "status":
        Console().print(status(read_results(study, out, cells)))
        process = at_work(out)
        print(f"process {process} is at work in {out}" if process else f"none at work in {out}")
        return 0
    with refusing(out, key="--out"):
        out.mkdir(parents=True, exist_ok=True)
    if mode == "report":
        print(write_report(study, out))
        return 0
    if mode == "background":
        return _detach(file, out, jobs, only, overrides)
    drawn = time.monotonic()
    this_machine = environment() if any(task_of(study, cell, out) for cell in cells) else None

    def redraw() -> None:
        nonlocal drawn
        if time.monotonic() - drawn > REDRAW_S:
            write_report(study, out, this_machine)
            drawn = time.monotonic()

    code = run(study, cells, out, jobs=jobs, redraw=redraw, qurl=qurl)
    print(write_report(study, out, this_machine), flush=True)
    return code


def status(results: Sequence[Result]) -> Table:
    """A line per cell: how far it is, and what it last measured."""
    grid = Table(box=None, pad_edge=False)
    for name in ("cell", "state", "step", "reward", "accuracy", ""):
        numbers = name in ("step", "reward", "accuracy")
        grid.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for result in results:
        reward, accuracy = result.last("reward/mean"), result.last("eval/accuracy")
        style = STYLES[result.state]
        grid.add_row(
            result.cell.name,
            f"[{style}]{result.state}[/]" if style else result.state,
            f"{result.step}/{result.cell.steps}",
            "" if reward is None else number(reward),
            "" if accuracy is None else percent(accuracy),
            escape(result.reason),
        )
    return grid


def matching(study: Study, only: str) -> list[Cell]:
    """The cells whose names the pattern matches.

    Raises:
        ConfigError: there are none.
    """
    cells = [cell for cell in study.cells if fnmatch.fnmatchcase(cell.name, only)]
    if not cells:
        raise ConfigError(
            f"--only {only} matches no cell; they are named like {study.cells[0].name}"
        )
    return cells


def _detach(file: Path, out: Path, jobs: int, only: str, overrides: Sequence[str]) -> int:
    """Start the study again in a session of its own, and leave it alone once it is at work."""
    if at_work(out):
        raise ConfigError(f"a study is at work in {out} already; --status shows how far it is")
    log = out / "study.log"
    arguments = [str(file), *overrides]
    arguments += ["--out", str(out), "--jobs", str(jobs), "--only", only]
    with log.open("ab") as output:
        popen = subprocess.Popen(
            [sys.executable, "-m", "qurl_megatron.cli", "study", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    end = time.monotonic() + START_S
    while popen.poll() is None and at_work(out) != popen.pid and time.monotonic() < end:
        time.sleep(0.1)
    if popen.returncode:
        raise ConfigError(f"the study ended with status {popen.returncode}; see {log}")
    print(f"process {popen.pid} runs the study; its log is {log}, --status shows how far it is")
    return 0
