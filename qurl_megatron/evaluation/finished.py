"""All that tables, pictures and study.json are made of: the finished runs, grouped by method.

A cell counts when it is done. One that failed has no final number: it is listed with its reason
beside the tables, whose columns say how many runs they stand on.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qurl_megatron import __version__
from qurl_megatron.evaluation.greedy_accuracy import accuracy, due
from qurl_megatron.evaluation.numbers import Series, Spread, aggregate, finals
from qurl_megatron.evaluation.plan import Cell, Method, Study
from qurl_megatron.evaluation.runner import failures, running
from qurl_megatron.evaluation.runs import look
from qurl_megatron.observe.history import History
from qurl_megatron.schemes import SCHEMES

CURVES = (
    "reward/mean",
    "eval/accuracy",
    "policy/clip_fraction",
    "rollout/kl_k3",
    "rollout/rho_max",
    "quant/code_flip_rate",
    "quant/weight_update",
    "quant/weight_error",
)
"""Metrics that are drawn."""


@dataclass(frozen=True)
class Result:
    """One cell, as it stands."""

    cell: Cell
    state: str  # done, evaluating (its trained policy), running, failed or waiting
    reason: str  # of a failure
    history: History | None  # as far as it has come
    trained: float | None = None  # accuracy of the last checkpoint, unquantized

    @property
    def step(self) -> int:
        return self.history.last_step if self.history else 0

    @property
    def measured(self) -> History:
        """The history of a run that has one."""
        assert self.history is not None
        return self.history

    @property
    def done(self) -> bool:
        """All its steps are."""
        return self.state in ("done", "evaluating")

    def last(self, metric: str) -> float | None:
        return self.history.last(metric) if self.history else None


@dataclass(frozen=True)
class Group:
    """The finished runs of one method under one scheme; they differ by their seed."""

    name: str
    method: Method
    scheme: str
    cells: tuple[Cell, ...]  # planned, finished or not
    histories: dict[int, History]  # by seed, of those done
    totals: dict[str, Spread | None]

    @property
    def precision(self) -> str:
        """What generated, for a table."""
        if self.scheme == "none":  # what the model is in
            return {"bfloat16": "BF16", "float32": "FP32"}[self.cells[0].dtype]
        return self.scheme.upper() + (", simulated" if SCHEMES[self.scheme].simulated else "")

    def curves(self, metric: str) -> list[Series]:
        """One per seed that measured it."""
        return [history.series(metric) for history in self.histories.values() if metric in history]


def read_results(study: Study, out: Path, cells: Sequence[Cell] | None = None) -> list[Result]:
    """What became of the cells; of all of the study where none are given."""
    at_work, failed = running(out), failures(out)
    results = []
    for cell in study.cells if cells is None else cells:
        run_look = look(study, cell, out)
        state: str = run_look.state
        reason = run_look.reason
        if state == "waiting" and cell.name in at_work:
            state = "running"
        elif state == "waiting" and cell.name in failed:
            state, reason = "failed", failed[cell.name]
        elif state == "done" and cell.name in at_work and due(study, cell, out):
            state = "evaluating"
        elif state == "done":  # whose trained policy could not be evaluated
            reason = failed.get(cell.name, "")
        results.append(Result(cell, state, reason, run_look.history, accuracy(cell, out)))
    return results


def groups(study: Study, results: Sequence[Result]) -> list[Group]:
    """By scheme, unquantized first, then by method in the order of the study file."""
    own_schemes = (scheme for method in study.methods.values() for scheme in method.schemes)
    schemes = dict.fromkeys(["none", *study.settings.schemes, *own_schemes])
    all_groups = []
    for scheme in schemes:
        for name, method in study.methods.items():
            if scheme not in method.schemes:
                continue
            results_of_group = [
                r for r in results if (r.cell.method, r.cell.scheme) == (name, scheme)
            ]
            done = {r.cell.seed: r.measured for r in results_of_group if r.done}
            totals = aggregate([finals(r.measured, r.trained) for r in results_of_group if r.done])
            cells = tuple(result.cell for result in results_of_group)
            all_groups.append(Group(name, method, scheme, cells, done, totals))
    return all_groups


def to_json(study: Study, results: Sequence[Result]) -> dict[str, Any]:
    """The numbers behind tables and pictures, with the settings that gave them."""
    return {
        "study": study.title,
        "name": study.file.stem,
        "version": __version__,
        "recipe": study.resolved(),
        "methods": {name: asdict(method) for name, method in study.methods.items()},
        "runs": {result.cell.name: _run(result) for result in results},
        "groups": {
            f"{group.name},{group.scheme}": {
                "planned": len(group.cells),
                "done": len(group.histories),
                **{
                    name: None if spread is None else asdict(spread)
                    for name, spread in group.totals.items()
                },
            }
            for group in groups(study, results)
        },
    }


def _run(result: Result) -> dict[str, Any]:
    cell = result.cell
    document = {
        "state": result.state,
        "reason": result.reason,
        "step": result.step,
        "overrides": list(cell.overrides),
    }
    if not result.done:
        return document
    history = result.measured
    curves = {name: _curve(history.series(name)) for name in CURVES if name in history}
    return {
        **document,
        **finals(history, result.trained),
        "non_finite": history.non_finite,
        "curves": curves,
    }


def _curve(series: Series) -> dict[str, list[float]]:
    steps, values = series
    return {"steps": steps.tolist(), "values": [_short(value) for value in values]}


def _short(value: np.floating) -> float:
    return float(f"{value:.4g}")
