"""From run folders to numbers, and from numbers to study.json and study.md.

A cell counts when its run is done. A failed one has no final number: it is listed with its reason,
and the tables say on how many runs they stand.

Shapes: N = steps at which a metric was measured.
"""

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qurl_megatron import __version__
from qurl_megatron.evaluation.results import aligned
from qurl_megatron.evaluation.study_plan import Cell, Method, Study, run_dir
from qurl_megatron.kit.disk import read_json, write_whole
from qurl_megatron.kit.errors import ConfigError, printable
from qurl_megatron.observe.metrics import History, Series
from qurl_megatron.observe.sinks import METRICS_FILE, read_metrics
from qurl_megatron.observe.text import number, percent
from qurl_megatron.schemes import SCHEMES, title
from qurl_megatron.training.state import refuse_other_run

BENCHMARK = "held_out"

WINDOW = 5
"""Steps whose mean reward counts as the reward of the last of them: one bad batch is no
collapse."""


def at_end(values_N: np.ndarray) -> float:
    """Return the mean over the last tenth of the steps; single batches are noisy."""
    return values_N[-max(1, len(values_N) // 10) :].mean()


def after_the_first(values_N: np.ndarray) -> float:
    """Return the median of all but the first step, which alone pays for caches and compilation."""
    return np.median(values_N[min(1, len(values_N) - 1) :])


def over_steps(values_N: np.ndarray) -> float | None:
    """Return the standard deviation over the steps (n - 1); None for a single step."""
    return values_N.std(ddof=1) if len(values_N) > 1 else None


TRAINED = "accuracy_trained"
"""Accuracy of the last checkpoint itself, unquantized; no metric of the run has it."""

FINALS: dict[str, tuple[str, Callable[[np.ndarray], float | None]]] = {
    "accuracy_before": ("eval/accuracy", lambda values_N: values_N[0]),
    "accuracy": ("eval/accuracy", lambda values_N: values_N[-1]),
    "accuracy_best": ("eval/accuracy", np.max),
    "reward": ("reward/mean", at_end),
    "kl": ("rollout/kl_k3", at_end),
    "kl_mean": ("rollout/kl_k3", np.mean),
    "kl_largest": ("rollout/kl_k3", np.max),
    "rho_max": ("rollout/rho_max", np.max),
    "clip_fraction": ("policy/clip_fraction", np.mean),
    "acr_active": ("acr/active_fraction", np.mean),
    "acr_rescued": ("acr/rescued_fraction", np.mean),
    "acr_gradient_share": ("acr/gradient_share", np.mean),
    "routes_differ": ("policy/routes_differ_fraction", np.mean),
    "code_flip_rate": ("quant/code_flip_rate", np.mean),
    "weight_update": ("quant/weight_update", np.mean),
    "weight_error": ("quant/weight_error", np.mean),
    "update_passed": ("quant/update_passed", np.mean),
    "update_passed_std": ("quant/update_passed", over_steps),
    "seconds": ("time/step", np.sum),
    "step_seconds": ("time/step", after_the_first),
}
"""The final numbers of a run: a metric, and how its values are reduced over the steps."""
CURVES = ("reward/mean", "eval/accuracy")
"""Metrics that study.json keeps of every step: a table made of it later may ask for other steps."""

FINAL_NAMES = (TRAINED, *FINALS, "collapse_step")


@dataclass(frozen=True)
class Result:
    """One cell, as its folder shows it."""

    cell: Cell
    history: History = field(default_factory=History)  # up to the last step that the study asks for
    done: bool = False  # all its steps are, even if its trained policy is still to be evaluated
    reason: str = ""  # of a failure
    trained: float | None = None  # accuracy of the last checkpoint, unquantized

    @property
    def state(self) -> str:
        if self.done:
            return "done"
        if self.reason:
            return "failed"
        if self.history:
            return "started"
        return "waiting"

    @property
    def step(self) -> int:
        return self.history.last_step

    @property
    def finals(self) -> dict[str, float | None]:
        """``TRAINED``, ``FINALS`` and the step of collapse; None where the run did not measure."""
        final_values = dict.fromkeys(FINAL_NAMES)
        final_values[TRAINED] = self.trained
        for name, (metric, reduce) in FINALS.items():
            if metric in self.history and (value := reduce(self.history[metric][1])) is not None:
                final_values[name] = float(value)
        if "reward/mean" in self.history:
            final_values["collapse_step"] = collapse_step(*self.history["reward/mean"])
        return final_values


@dataclass(frozen=True)
class Group:
    """The runs of one method under one scheme; they differ by their warm start and their seed."""

    name: str
    method: Method
    scheme: str
    results: tuple[Result, ...]  # of its cells, finished or not

    @property
    def done(self) -> list[Result]:
        return [result for result in self.results if result.done]

    @property
    def precision(self) -> str:
        """Number format of the rollouts, for a table."""
        if self.scheme == "none" and self.results[0].cell.config.model.dtype == "float32":
            return "FP32"
        simulated = ", simulated" * SCHEMES[self.scheme].simulated
        return f"{title(self.scheme)}{simulated}"

    def curves(self, metric: str) -> list[Series]:
        """Return a curve for each run that measured the metric."""
        return [run.history[metric] for run in self.done if metric in run.history]

    def totals(self) -> dict[str, dict[str, Any] | None]:
        """Return the ``spread`` of each final number over the runs."""
        runs = [result.finals for result in self.done]
        return {name: spread([run[name] for run in runs]) for name in FINAL_NAMES}


def collapse_step(steps_N: np.ndarray, rewards_N: np.ndarray) -> int | None:
    """Return the first step from which the reward stays below half of its best until the end.

    The reward of a step is the mean over it and the ``WINDOW - 1`` steps before it; its best is the
    highest so far. None where the last step is at half of the best or more, and where the reward
    was never positive.
    """
    reward_N = np.empty(len(rewards_N))
    for i in range(len(rewards_N)):
        reward_N[i] = rewards_N[max(0, i + 1 - WINDOW) : i + 1].mean()
    best_N = np.maximum.accumulate(reward_N)
    fallen_N = (best_N > 0) & (reward_N < 0.5 * best_N)
    if not len(fallen_N) or not fallen_N[-1]:
        return None
    standing = np.flatnonzero(~fallen_N)  # never empty: the first reward is its own best
    return int(steps_N[standing[-1] + 1])


def spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Return mean and spread over the runs that measured it; None where none did.

    ``std`` is the sample's own (n - 1), None for a single value.
    """
    measured = [value for value in values if value is not None]
    if not measured:
        return None
    return {
        "mean": statistics.fmean(measured),
        "std": statistics.stdev(measured) if len(measured) > 1 else None,
        "low": min(measured),
        "high": max(measured),
        "values": measured,
    }


def trained_dir(out: Path, cell: Cell) -> Path:
    """Return the folder of the trained policy's evaluation, by the number of its questions."""
    folder = f"trained_{cell.final_prompts}" if cell.final_prompts else "trained"
    return run_dir(out, cell) / folder / f"step_{cell.steps:06d}"


def failure_file(out: Path, cell: Cell) -> Path:
    """Return the file with the reason of a cell that failed when it last ran."""
    return out / "logs" / f"{cell.name}.failed"


def read_result(cell: Cell, out: Path) -> Result:
    """Read a cell's run folder.

    Done: all steps are measured, and the last one is evaluated where the recipe evaluates. Failed:
    when it last ran; or the folder holds a run with other settings, or damaged metrics.
    """
    folder, failed = run_dir(out, cell), failure_file(out, cell)
    reason = printable(failed.read_text(encoding="utf-8")) if failed.is_file() else ""
    metrics = folder / METRICS_FILE
    if not metrics.is_file() or b"\n" not in metrics.read_bytes():
        return Result(cell, reason=reason)
    try:
        changes = refuse_other_run(folder, cell.config)
        if pinned := [str(change) for change in changes if change.rule != "free"]:
            raise ConfigError(
                f"{folder} holds a run with other settings ({'; '.join(pinned)}); move it away"
            )
        records = read_metrics(metrics)
    except ConfigError as error:
        return Result(cell, reason=str(error))
    history = History(record for record in records if record.step <= cell.steps)
    measured = history.last_step
    if cell.config.train.eval_prompts > 0:
        measured = 0
        if "eval/accuracy" in history:
            measured = history["eval/accuracy"][0][-1]
    trained = None
    results = trained_dir(out, cell) / "results.json"
    if results.is_file():
        trained = read_json(results)["benchmarks"][BENCHMARK]["greedy"]["accuracy"]
    return Result(cell, history, bool(measured >= cell.steps), reason, trained)


def groups(study: Study, results: Sequence[Result]) -> list[Group]:
    """Group results by scheme, unquantized first, then by method as the study file orders them."""
    schemes = dict.fromkeys(["none", *study.settings.schemes])
    schemes |= dict.fromkeys(result.cell.scheme for result in results)
    ordered = []
    for scheme in schemes:
        for name, method in study.methods.items():
            members = [r for r in results if (r.cell.scheme, r.cell.method) == (scheme, name)]
            if members:
                ordered.append(Group(name, method, scheme, tuple(members)))
    return ordered


def to_json(study: Study, results: Sequence[Result]) -> dict[str, Any]:
    """Return study.json: the numbers of tables and pictures, and the settings that gave them."""
    runs, of_groups = {}, {}
    for result in results:
        document = {
            "state": result.state,
            "reason": result.reason,
            "step": result.step,
            "method": result.cell.method,
            "scheme": result.cell.scheme,
            "warmstart_seed": result.cell.warmstart_seed,
            "seed": result.cell.seed,
            "overrides": list(result.cell.overrides),
        }
        if result.done:
            document |= result.finals | {"curves": curves(result.history)}
        runs[result.cell.name] = document
    for group in groups(study, results):
        counts = {"planned": len(group.results), "done": len(group.done)}
        of_groups[f"{group.name},{group.scheme}"] = counts | group.totals()
    return {
        "study": study.title,
        "name": study.file.stem,
        "version": __version__,
        "recipe": study.resolved(),
        "methods": {name: asdict(method) for name, method in study.methods.items()},
        "runs": runs,
        "groups": of_groups,
    }


def curves(history: History) -> dict[str, dict[str, list[float]]]:
    """Return steps and values of each metric of ``CURVES``, to four digits."""
    kept = {}
    for name in CURVES:
        if name in history:
            steps, values = history[name]
            kept[name] = {
                "steps": steps.tolist(),
                "values": [float(f"{value:.4g}") for value in values],
            }
    return kept


def compact(document: Mapping[str, Any]) -> str:
    """Return JSON with a line for each key, and one for each list of numbers."""
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    lists_of_numbers = re.compile(r"\[\s+[-\d][^\[\]{}\"]*\]")
    return lists_of_numbers.sub(lambda match: " ".join(match[0].split()), text)


NOTHING = "–"


def row(group: Group) -> dict[str, str]:
    """Return a line of the table in study.md, by heading."""
    totals = group.totals()

    def total(name: str, text: Callable[[float], str] = number, of: str = "mean") -> str:
        if (spread_of_runs := totals[name]) is None:
            return NOTHING
        return text(spread_of_runs[of])

    def accuracy(name: str) -> str:
        text = total(name, lambda mean: f"{100 * mean:.1f}")
        if (deviation := (totals[name] or {}).get("std")) is not None:
            text += f" ± {100 * deviation:.1f}"
        return text

    done, planned = len(group.done), len(group.results)
    return {
        "Method": group.method.label,
        "Rollouts": group.precision,
        "Trained policy, %": accuracy(TRAINED),
        "Accuracy, %": accuracy("accuracy"),
        "Best, %": accuracy("accuracy_best"),
        "Collapsed": _collapse(done, totals["collapse_step"]),
        "KL": total("kl_mean"),
        "Max ρ": total("rho_max", of="high"),
        "Clipped": total("clip_fraction", percent),
        "Code flips": total("code_flip_rate", percent),
        "Update, Eq. 13": total("weight_update"),
        "Error, Eq. 14": total("weight_error"),
        "Step, s": total("step_seconds"),
        "Runs": str(done) if done == planned else f"{done} of {planned}",
    }


def _collapse(done: int, steps: dict[str, Any] | None) -> str:
    """Write "2 of 3, steps 41 to 47"; a run that did not collapse has no step."""
    if steps is None:
        return f"0 of {done}" if done else NOTHING
    low, high = int(steps["low"]), int(steps["high"])
    when = f"step {low}" if low == high else f"steps {low} to {high}"
    return f"{len(steps['values'])} of {done}, {when}"


NOTE = f"""\
Columns that no run has measured are left out. **Trained policy** is the last checkpoint itself,
unquantized and decoded greedily, on the held-out questions (`qurl eval`): what one trains for. It
is – where engines other than embedded ones generated, the last step left no checkpoint, or the
evaluation has failed or not finished yet. The other accuracies are of the same questions at the
precision of the rollouts; "best" is the highest evaluation of each run. ± is the standard deviation
over runs (n − 1), which differ in their seed and, where the study says so, in their warm start.

A run has **collapsed** at the first step from which its reward, a mean over {WINDOW} steps, stays
below half of its best until the end. **KL** is of the behaviour from the proximal policy (k3, per
token), **max ρ** the largest ratio of proximal to behaviour probability of any token of any run.

Code flips, the **update** ‖θ′ − θ‖² / ‖θ‖² of Eq. 13 and the **error** ‖Q(θ) − θ‖² / ‖θ‖² of Eq. 14
are of the quantized linear layers; like KL and clipped tokens they are means over all steps. The
time of a step is the median of all but the first."""


def table(groups: Sequence[Group]) -> str:
    """Return the Markdown table of the groups, without columns that no run has measured."""
    lines = [row(group) for group in groups]
    headings = [name for name in lines[0] if any(line[name] != NOTHING for line in lines)]
    cells = [headings]
    for line in lines:
        cells.append([_one_line(line[heading]) for heading in headings])
    return aligned(cells, left=2)


def page(
    study: Study, results: Sequence[Result], groups: Sequence[Group], pictures: Sequence[str]
) -> str:
    """Return study.md; the pictures lie beside it."""
    summary = f"{sum(result.done for result in results)} of {len(results)} runs are done"
    if failed := [result for result in results if result.reason]:
        summary += f", {len(failed)} failed"
    summary += ". study.json has every number, the recipe and each run's overrides."
    parts = [f"# {study.title}", summary, table(groups), NOTE]
    if pictures:
        parts += [
            "## Curves (the paper's Figures 2, 3, 4 and 9)",
            "Mean over runs, smoothed, on the band from the lowest to the highest run.",
        ]
        parts += [f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in pictures]
    if failed:
        lines = []
        for result in failed:
            reason = _one_line(result.reason)
            lines.append(f"- `{result.cell.name}`, after step {result.step}: {reason}")
        parts += ["## Runs that failed", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _one_line(text: str) -> str:
    """Return text fit for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def write_report(study: Study, out: Path, environment: Mapping[str, Any] | None = None) -> Path:
    """Write OUT/study.json, OUT/study.md and the pictures; return the path of study.md.

    Args:
        environment: of runs made now; None keeps the one in study.json.
    """
    from qurl_megatron.evaluation.pictures import pictures  # matplotlib

    results = [read_result(cell, out) for cell in study.cells]
    all_groups = groups(study, results)
    images = pictures(all_groups)
    for name, image in images.items():
        write_whole(out / name, image)
    path = out / "study.json"
    if environment is None and path.is_file():
        environment = read_json(path).get("environment")
    document = to_json(study, results)
    if environment is not None:
        document["environment"] = dict(environment)
    write_whole(path, compact(document))
    path = out / "study.md"
    write_whole(path, page(study, results, all_groups, list(images)))
    return path
