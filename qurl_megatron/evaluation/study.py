"""``qurl study``: run the cells of a study file, or only look at them."""

import fnmatch
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qurl_megatron.bench.environment import environment
from qurl_megatron.evaluation.plan import Cell, Study, read_study
from qurl_megatron.evaluation.runner import QURL, at_work, next_task, run, train_command
from qurl_megatron.evaluation.study_results import Result, read_results, write_report
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import refusing
from qurl_megatron.observe.text import number, percent

STYLES = {"done": "green", "running": "yellow", "failed": "red", "waiting": "default"}


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
    """Run ``qurl study``.

    Args:
        overrides: ``section.key=value`` for every run; a method's own overrides win.
        only: pattern of the names of cells to run or list; tables and pictures take all.
        mode: "dry_run", "status" or "report"; None runs the cells.

    Returns:
        0, or the exit code of ``runner.run``.

    Raises:
        ConfigError: a mistake in the study file, in one of its recipes or in the arguments.
    """
    study = read_study(file, overrides)
    cells = matching(study, only)
    if jobs < 1:
        raise ConfigError(f"--jobs must be 1 or more, got {jobs}")
    if mode == "dry_run":
        for result in read_results(study, out, cells):
            print(f"{result.state:11}{shlex.join(train_command(study, result.cell, out, qurl))}")
        return 0
    if mode == "status":
        Console().print(status(read_results(study, out, cells)))
        print(f"a study is at work in {out}" if at_work(out) else f"none at work in {out}")
        return 0
    with refusing(out, key="--out"):
        out.mkdir(parents=True, exist_ok=True)
    code, machine = 0, None
    if mode is None:
        if any(next_task(study, cell, out) for cell in cells):
            machine = environment()
        code = run(study, cells, out, jobs=jobs, qurl=qurl)
    print(write_report(study, out, machine), flush=True)
    return code


def status(results: Sequence[Result]) -> Table:
    """A line per cell: how far it is, and its last reward and accuracy."""
    grid = Table(box=None, pad_edge=False)
    for name in ("cell", "state"):
        grid.add_column(name, overflow="fold")
    for name in ("step", "reward", "accuracy"):
        grid.add_column(name, justify="right", overflow="fold")
    grid.add_column("", overflow="fold")
    for result in results:
        reward = accuracy = None
        if result.history:
            reward = result.history.last("reward/mean")
            accuracy = result.history.last("eval/accuracy")
        grid.add_row(
            result.cell.name,
            f"[{STYLES[result.state]}]{result.state}[/]",
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
