"""study.md: the paper's Tables 1 and 4 for the study's runs, its pictures, and what they mean."""

from collections.abc import Callable, Sequence
from pathlib import Path

from qurl_megatron.evaluation.finished import Group, Result
from qurl_megatron.evaluation.numbers import TRAINED, WINDOW, Spread
from qurl_megatron.evaluation.plan import METHODS, MISMATCH, SCALE, Study
from qurl_megatron.observe.text import number, percent, plus_minus, scientific

NOTHING = "–"

TABLE_1_NOTE = f"""\
Trained policy is the last checkpoint itself, **unquantized** and decoded greedily, on the held-out
questions (`qurl eval`): what one trains for. It is – where engines other than embedded ones
generated and the study file does not set `trained_by_embedded`, the recipe has no held-out
questions, the last step left no checkpoint, or the evaluation has failed or not finished yet. The
other accuracies are of the same questions, generated at the precision of the rollouts: "before" at
step 0, "best" the highest evaluation of each run. All are mean ± standard deviation over seeds
(n − 1). A run has collapsed at the first step from which its reward, a mean over {WINDOW} steps,
stays below half of its best until the end. KL is of the behaviour from the proximal policy (k3, per
token): mean over the last tenth of the steps, and its largest step. Max ρ is the largest ratio of
proximal to behaviour probability of any token of any run."""

TABLE_4_NOTE = """\
Code flips, the update ‖θ′ − θ‖² / ‖θ‖² of Eq. 13 and the quantization error ‖Q(θ) − θ‖² / ‖θ‖² of
Eq. 14 are of the quantized linear layers, per step (the paper shows Eq. 13 across 16 steps), and
like the clipped tokens averaged over all steps."""

MISMATCH_NOTE = """\
KL of the behaviour from the proximal policy (k3, per token), code flips and the part of an update
that reaches the quantized weights (`quant/update_passed`) are means over all steps; max ρ is the
largest ratio of any token, the time of a step the median of all but the first. Behind ± stands the
standard deviation over the steps (n − 1)."""

CURVES_NOTE = """\
Mean over seeds, smoothed, on the band from the lowest to the highest seed; for the largest ratio,
on each seed's own values."""


def page(
    study: Study, results: Sequence[Result], groups: Sequence[Group], pictures: Sequence[Path]
) -> str:
    """study.md; the pictures lie beside it."""
    parts = [f"# {study.title}", _facts(study, results)]
    compared = [group for group in groups if METHODS in group.method.tables]
    scaled = [group for group in groups if SCALE in group.method.tables]
    if compared:
        parts += ["## Methods (the paper's Table 1)", table(compared, TABLE_1), TABLE_1_NOTE]
    if scaled:
        title = "## UAQ scale and learning rate (the paper's Table 4)"
        parts += [title, table(scaled, TABLE_4), TABLE_4_NOTE]
    if mismatched := [group for group in groups if MISMATCH in group.method.tables]:
        title = "## Rollout and trainer (docs/mismatch.md)"
        parts += [title, table(mismatched, TABLE_MISMATCH), MISMATCH_NOTE]
    if pictures:
        parts += ["## Curves (the paper's Figures 2, 3 and 9)"]
        parts += [CURVES_NOTE]
        parts += [f"![{path.stem.replace('_', ' ')}]({path.name})" for path in pictures]
    if failed := [result for result in results if result.reason]:
        rows = [f"- `{r.cell.name}`, after step {r.step}: {_cell(r.reason)}" for r in failed]
        parts += ["## Runs that failed", "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def table(groups: Sequence[Group], columns: dict[str, Callable[[Group], str]]) -> str:
    """Markdown; the first two columns are words, the others numbers."""
    head = [f"| {' | '.join(columns)} |", f"|---|---|{'---:|' * (len(columns) - 2)}"]
    rows = [[_cell(write(group)) for write in columns.values()] for group in groups]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


def _facts(study: Study, results: Sequence[Result]) -> str:
    states = [result.state for result in results]
    done = f"{sum(result.done for result in results)} of {len(states)} runs are done"
    if failed := states.count("failed"):
        done += f", {failed} failed"
    recipe = study.resolved()
    train, algo = recipe["train"], recipe["algo"]
    batch = recipe["data"]["prompts_per_step"], recipe["rollout"]["samples_per_prompt"]
    steps = sorted({result.cell.steps for result in results})
    seeds = ", ".join(map(str, study.settings.seeds))
    avg = f"Avg@{train['eval_samples']} on {train['eval_prompts']} held-out prompts"
    return (
        f"{done}: {' or '.join(map(str, steps))} steps of {batch[0]} prompts x {batch[1]} "
        f"responses in {algo['minibatches']} minibatches; accuracy is {avg}; seeds {seeds}. "
        "study.json has every number, the recipe and each run's overrides."
    )


def shares(name: str) -> Callable[[Group], str]:
    """Percent, mean and spread over seeds."""

    def write(group: Group) -> str:
        spread = group.totals[name]
        if spread is None:
            return NOTHING
        text = f"{100 * spread.mean:.1f}"
        return text if spread.std is None else f"{text} ± {100 * spread.std:.1f}"

    return write


def means(name: str, text: Callable[[float], str] = number) -> Callable[[Group], str]:
    def write(group: Group) -> str:
        spread = group.totals[name]
        return NOTHING if spread is None else text(spread.mean)

    return write


def _largest_ratio(group: Group) -> str:
    spread = group.totals["rho_max"]
    return NOTHING if spread is None else number(spread.high)


def _kl(group: Group) -> str:
    end, largest = group.totals["kl"], group.totals["kl_largest"]
    if end is None or largest is None:  # from one series
        return NOTHING
    return f"{number(end.mean)} ({number(largest.high)})"


def _collapse(group: Group) -> str:
    """ "2 of 3, steps 41 to 47"; a run that did not collapse has no step."""
    if not group.histories:
        return NOTHING
    spread: Spread | None = group.totals["collapse_step"]
    if spread is None:
        return f"0 of {len(group.histories)}"
    low, high = int(spread.low), int(spread.high)
    steps = f"step {low}" if low == high else f"steps {low} to {high}"
    return f"{len(spread.values)} of {len(group.histories)}, {steps}"


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


TABLE_1: dict[str, Callable[[Group], str]] = {
    "Method": lambda group: group.method.label,
    "Rollouts": lambda group: group.precision,
    "Trained policy, %": shares(TRAINED),
    "Before, %": shares("accuracy_before"),
    "Accuracy, %": shares("accuracy"),
    "Best, %": shares("accuracy_best"),
    "Collapsed": _collapse,
    "KL at the end (largest)": _kl,
    "Max ρ": _largest_ratio,
    "Runs": _runs,
}

TABLE_4: dict[str, Callable[[Group], str]] = {
    "Scale s": lambda group: f"s = {group.cells[0].uaq_scale:g}",
    "Rollouts": lambda group: group.precision,
    "Trained policy, %": shares(TRAINED),
    "Learning rate": lambda group: scientific(group.cells[0].lr),
    "Accuracy, %": shares("accuracy"),
    "Clipped": means("clip_fraction", percent),
    "Code flips": means("code_flip_rate", percent),
    "Update, Eq. 13": means("weight_update"),
    "Error, Eq. 14": means("weight_error"),
    "Update / error": _update_to_error,
    "Runs": _runs,
}


TABLE_MISMATCH: dict[str, Callable[[Group], str]] = {
    "Setting": lambda group: group.method.label,
    "Rollouts": lambda group: group.precision,
    "KL": means("kl_mean"),
    "Max ρ": _largest_ratio,
    "Code flips": means("code_flip_rate", percent),
    "Update passed": _update_passed,
    "Step, s": means("step_seconds"),
    "Runs": _runs,
}


def _cell(text: str) -> str:
    """Fit for one cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")
