"""From finished runs to numbers, and from numbers to study.json and study.md.

A cell counts when its run is done. A failed one has no final number: it is listed with its reason,
and the tables say on how many runs they stand.

Shapes: N = steps at which a metric was measured.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qurl_megatron import __version__
from qurl_megatron.evaluation.plan import Cell, Method, Study
from qurl_megatron.evaluation.runner import failures, progress, running, trained_accuracy
from qurl_megatron.kit.disk import write_whole
from qurl_megatron.observe.history import History
from qurl_megatron.observe.text import number, percent, plus_minus, scientific
from qurl_megatron.schemes import SCHEMES

WINDOW = 5
"""Steps whose mean reward counts as the reward of the last of them: one bad batch is no
collapse."""

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
"""Metrics that study.json keeps of every step."""

Series = tuple[np.ndarray, np.ndarray]
"""Steps and values, [N] each."""


def at_end(values_N: np.ndarray) -> float:
    """Mean over the last tenth of the steps; single batches are noisy."""
    return float(values_N[-max(1, len(values_N) // 10) :].mean())


def after_the_first(values_N: np.ndarray) -> float:
    """Median of all but the first step, which alone pays for caches and compilation."""
    return float(np.median(values_N[1:] if len(values_N) > 1 else values_N))


def over_steps(values_N: np.ndarray) -> float | None:
    """Standard deviation over the steps (n - 1); None for a single step."""
    return float(values_N.std(ddof=1)) if len(values_N) > 1 else None


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
    "code_flip_rate": ("quant/code_flip_rate", np.mean),
    "weight_update": ("quant/weight_update", np.mean),
    "weight_error": ("quant/weight_error", np.mean),
    "update_passed": ("quant/update_passed", np.mean),
    "update_passed_std": ("quant/update_passed", over_steps),
    "seconds": ("time/step", np.sum),
    "step_seconds": ("time/step", after_the_first),
}
"""The final numbers of a run: a metric, and how its values are reduced over the steps."""


@dataclass(frozen=True)
class Spread:
    """One number over several seeds."""

    mean: float
    std: float | None  # n - 1; None for a single value
    low: float
    high: float
    values: tuple[float, ...]


@dataclass(frozen=True)
class Result:
    """One cell as it stands."""

    cell: Cell
    state: str  # done, running, failed or waiting
    done: bool  # all its steps are, even if its trained policy is still to be evaluated
    reason: str  # of a failure
    history: History | None  # as far as it has come
    trained: float | None = None  # accuracy of the last checkpoint, unquantized

    @property
    def step(self) -> int:
        return self.history.last_step if self.history else 0

    @property
    def finals(self) -> dict[str, float | None]:
        assert self.history is not None
        return finals(self.history, self.trained)


@dataclass(frozen=True)
class Group:
    """The finished runs of one method under one scheme; they differ by their seed."""

    name: str
    method: Method
    scheme: str
    cells: tuple[Cell, ...]  # planned, finished or not
    histories: dict[int, History]  # of those done, by seed
    totals: dict[str, Spread | None]

    @property
    def precision(self) -> str:
        """Number format of the rollouts, for a table."""
        if self.scheme == "none":
            dtype = self.cells[0].config.model.dtype
            return {"bfloat16": "BF16", "float32": "FP32"}[dtype]
        return self.scheme.upper() + (", simulated" if SCHEMES[self.scheme].simulated else "")

    def curves(self, metric: str) -> list[Series]:
        """One per seed that measured it."""
        return [history.series(metric) for history in self.histories.values() if metric in history]


def collapse_step(steps_N: np.ndarray, rewards_N: np.ndarray) -> int | None:
    """The first step from which the reward stays below half of its best until the run ends.

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


def finals(history: History, trained: float | None = None) -> dict[str, float | None]:
    """``FINALS`` and the step of collapse of one run; None where it did not measure.

    Args:
        trained: accuracy of its last checkpoint, unquantized.
    """
    final_values: dict[str, float | None] = {TRAINED: trained}
    for name, (metric, reduce) in FINALS.items():
        value = reduce(history.series(metric)[1]) if metric in history else None
        final_values[name] = None if value is None else float(value)
    final_values["collapse_step"] = None
    if "reward/mean" in history:
        final_values["collapse_step"] = collapse_step(*history.series("reward/mean"))
    return final_values


def spread(values: Sequence[float | None]) -> Spread | None:
    """Mean and spread over the seeds that measured it; None where none did."""
    measured = tuple(value for value in values if value is not None)
    if not measured:
        return None
    mean = math.fsum(measured) / len(measured)
    std = None
    if len(measured) > 1:
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in measured) / (len(measured) - 1))
    return Spread(mean, std, min(measured), max(measured), measured)


def read_results(study: Study, out: Path, cells: Sequence[Cell] | None = None) -> list[Result]:
    """How far each cell is; of the whole study where no cells are given."""
    running_cells, reasons = running(out), failures(out)
    results = []
    for cell in study.cells if cells is None else cells:
        reached = progress(cell, out)
        state: str = reached.state
        reason = reached.reason or reasons.get(cell.name, "")
        if cell.name in running_cells:
            state = "running"
        elif state == "waiting" and reason:
            state = "failed"
        trained = trained_accuracy(cell, out)
        done = reached.state == "done"
        results.append(Result(cell, state, done, reason, reached.history, trained))
    return results


def groups(study: Study, results: Sequence[Result]) -> list[Group]:
    """By scheme, unquantized first, then by method in the order of the study file."""
    schemes = dict.fromkeys(["none", *study.settings.schemes])
    for method in study.methods.values():
        schemes |= dict.fromkeys(method.schemes)
    all_groups = []
    for scheme in schemes:
        for name, method in study.methods.items():
            if scheme not in method.schemes:
                continue
            planned, histories, runs = [], {}, []
            for result in results:
                if (result.cell.method, result.cell.scheme) != (name, scheme):
                    continue
                planned.append(result.cell)
                if result.done and result.history is not None:
                    histories[result.cell.seed] = result.history
                    runs.append(result.finals)
            totals = {}
            for total in (TRAINED, *FINALS, "collapse_step"):
                totals[total] = spread([run[total] for run in runs])
            all_groups.append(Group(name, method, scheme, tuple(planned), histories, totals))
    return all_groups


# study.json


def to_json(study: Study, results: Sequence[Result]) -> dict[str, Any]:
    """The numbers behind tables and pictures, with the settings that gave them."""
    group_documents = {}
    for group in groups(study, results):
        document: dict[str, Any] = {"planned": len(group.cells), "done": len(group.histories)}
        for name, total in group.totals.items():
            document[name] = asdict(total) if total else None
        group_documents[f"{group.name},{group.scheme}"] = document
    return {
        "study": study.title,
        "name": study.file.stem,
        "version": __version__,
        "recipe": study.resolved(),
        "methods": {name: asdict(method) for name, method in study.methods.items()},
        "runs": {result.cell.name: _run(result) for result in results},
        "groups": group_documents,
    }


def _run(result: Result) -> dict[str, Any]:
    document = {
        "state": result.state,
        "reason": result.reason,
        "step": result.step,
        "overrides": list(result.cell.overrides),
    }
    history = result.history
    if not result.done or history is None:
        return document
    curves = {}
    for name in CURVES:
        if name in history:
            steps, values = history.series(name)
            short = [float(f"{value:.4g}") for value in values]
            curves[name] = {"steps": steps.tolist(), "values": short}
    return {**document, **result.finals, "non_finite": history.non_finite, "curves": curves}


# study.md

NOTHING = "–"
Writer = Callable[[Group], str]


def total(name: str, text: Callable[[float], str] = number, *, part: str = "mean") -> Writer:
    """Write one part of the spread of a number: its mean, or its highest value."""

    def write(group: Group) -> str:
        spread_ = group.totals[name]
        return NOTHING if spread_ is None else text(getattr(spread_, part))

    return write


def accuracy(name: str) -> Writer:
    """Write percent, mean and spread over seeds."""

    def write(group: Group) -> str:
        spread_ = group.totals[name]
        if spread_ is None:
            return NOTHING
        text = f"{100 * spread_.mean:.1f}"
        return text if spread_.std is None else f"{text} ± {100 * spread_.std:.1f}"

    return write


def _kl(group: Group) -> str:
    end, largest = group.totals["kl"], group.totals["kl_largest"]
    if end is None or largest is None:
        return NOTHING
    return f"{number(end.mean)} ({number(largest.high)})"


def _collapse(group: Group) -> str:
    """ "2 of 3, steps 41 to 47"; a run that did not collapse has no step."""
    if not group.histories:
        return NOTHING
    collapses = group.totals["collapse_step"]
    if collapses is None:
        return f"0 of {len(group.histories)}"
    low, high = int(collapses.low), int(collapses.high)
    steps = f"step {low}" if low == high else f"steps {low} to {high}"
    return f"{len(collapses.values)} of {len(group.histories)}, {steps}"


def _runs(group: Group) -> str:
    done, planned = len(group.histories), len(group.cells)
    return str(done) if done == planned else f"{done} of {planned}"


def _update_passed(group: Group) -> str:
    mean, std = group.totals["update_passed"], group.totals["update_passed_std"]
    if mean is None:
        return NOTHING
    return plus_minus(mean.mean, mean.mean, None if std is None else std.mean)


def _update_to_error(group: Group) -> str:
    update, error = group.totals["weight_update"], group.totals["weight_error"]
    if update is None or error is None or error.mean == 0:
        return NOTHING
    return number(update.mean / error.mean)


COLUMNS: dict[str, Writer] = {
    "Method": lambda group: group.method.label,
    "Rollouts": lambda group: group.precision,
    "Scale s": lambda group: f"s = {group.cells[0].config.quant.uaq_scale:g}",
    "Learning rate": lambda group: scientific(group.cells[0].config.optimizer.lr),
    "Trained policy, %": accuracy(TRAINED),
    "Before, %": accuracy("accuracy_before"),
    "Accuracy, %": accuracy("accuracy"),
    "Best, %": accuracy("accuracy_best"),
    "Collapsed": _collapse,
    "KL at the end (largest)": _kl,
    "KL": total("kl_mean"),
    "Max ρ": total("rho_max", part="high"),
    "Clipped": total("clip_fraction", percent),
    "Code flips": total("code_flip_rate", percent),
    "Update, Eq. 13": total("weight_update"),
    "Error, Eq. 14": total("weight_error"),
    "Update / error": _update_to_error,
    "Update passed": _update_passed,
    "Step, s": total("step_seconds"),
    "Runs": _runs,
}
"""The columns of the table, by heading: the paper's Tables 1 and 4, and docs/mismatch.md."""

NOTE = f"""\
Columns that no run has measured are left out. **Trained policy** is the last checkpoint itself,
unquantized and decoded greedily, on the held-out questions (`qurl eval`): what one trains for. It
is – where engines other than embedded ones generated and the study file does not set
`trained_by_embedded`, the last step left no checkpoint, or the evaluation has failed or not
finished yet. The other accuracies are of the same questions at the precision of the rollouts:
"before" at step 0, "best" the highest evaluation of each run. ± is the standard deviation over
seeds (n − 1), of "update passed" over steps.

A run has **collapsed** at the first step from which its reward, a mean over {WINDOW} steps, stays
below half of its best until the end. **KL** is of the behaviour from the proximal policy (k3, per
token): its mean over all steps, and at the end over the last tenth of them, with the largest step
behind. **Max ρ** is the largest ratio of proximal to behaviour probability of any token of any run.

Code flips, the **update** ‖θ′ − θ‖² / ‖θ‖² of Eq. 13, the **error** ‖Q(θ) − θ‖² / ‖θ‖² of Eq. 14
and the part of an update that reaches the quantized weights ("update passed") are of the quantized
linear layers; like the clipped tokens they are means over all steps. The time of a step is the
median of all but the first."""


def table(groups: Sequence[Group]) -> str:
    """The table in Markdown, a line for each group; the first two columns are words."""
    columns = {}
    for heading, write in COLUMNS.items():
        column = [_one_line(write(group)) for group in groups]
        if set(column) != {NOTHING}:
            columns[heading] = column
    lines = [f"| {' | '.join(columns)} |", f"|---|---|{'---:|' * (len(columns) - 2)}"]
    for row in zip(*columns.values(), strict=True):
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def page(
    study: Study, results: Sequence[Result], groups: Sequence[Group], pictures: Sequence[Path]
) -> str:
    """study.md; the pictures lie beside it."""
    parts = [f"# {study.title}", _summary(study, results), table(groups), NOTE]
    if pictures:
        parts += [
            "## Curves (the paper's Figures 2, 3 and 9)",
            "Mean over seeds, smoothed, on the band from the lowest to the highest seed; for the "
            "largest ratio,\non each seed's own values.",
        ]
        parts += [f"![{path.stem.replace('_', ' ')}]({path.name})" for path in pictures]
    failed = []
    for result in results:
        if result.reason:
            reason = _one_line(result.reason)
            failed.append(f"- `{result.cell.name}`, after step {result.step}: {reason}")
    if failed:
        parts += ["## Runs that failed", "\n".join(failed)]
    return "\n\n".join(parts) + "\n"


def _summary(study: Study, results: Sequence[Result]) -> str:
    done = f"{sum(result.done for result in results)} of {len(results)} runs are done"
    if failed := sum(result.state == "failed" for result in results):
        done += f", {failed} failed"
    recipe = study.resolved()
    train, prompts = recipe["train"], recipe["data"]["prompts_per_step"]
    steps = sorted({result.cell.steps for result in results})
    seeds = ", ".join(map(str, study.settings.seeds))
    avg = f"Avg@{train['eval_samples']} on {train['eval_prompts']} held-out prompts"
    return (
        f"{done}: {' or '.join(map(str, steps))} steps of {prompts} prompts x "
        f"{recipe['rollout']['samples_per_prompt']} responses in {recipe['algo']['minibatches']} "
        f"minibatches; accuracy is {avg}; seeds {seeds}. study.json has every number, the recipe "
        "and each run's overrides."
    )


def _one_line(text: str) -> str:
    """Text fit for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def write_report(study: Study, out: Path, environment: Mapping[str, Any] | None = None) -> Path:
    """Write OUT/study.json, OUT/study.md and the pictures; returns the path of study.md.

    Args:
        environment: ``bench.environment`` where runs have been made now; None keeps the one that
            study.json has of earlier runs.
    """
    from qurl_megatron.evaluation.pictures import pictures  # matplotlib

    results = read_results(study, out)
    finished_groups = groups(study, results)
    images = pictures(finished_groups)
    for name, image in images.items():
        write_whole(out / name, image)
    path = out / "study.json"
    if environment is None and path.is_file():
        environment = json.loads(path.read_text(encoding="utf-8")).get("environment")
    document = to_json(study, results)
    if environment is not None:
        document["environment"] = dict(environment)
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    lists_of_numbers = re.compile(r"\[\s+[-\d][^\[\]{}\"]*\]")
    write_whole(path, lists_of_numbers.sub(lambda match: " ".join(match[0].split()), text))
    path = out / "study.md"
    write_whole(path, page(study, results, finished_groups, [out / name for name in images]))
    return path
