"""``qurl slurm status`` and ``hours``: how a run is, and where its GPU-hours went.

``describe`` is a function of the folder, the metrics, the queue and the time. The queue may be out
of reach, as on a machine without Slurm: the folder tells the rest.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from qurl_megatron.cluster import commands, folder
from qurl_megatron.cluster.cluster import ClusterConfig
from qurl_megatron.cluster.commands import Queued
from qurl_megatron.cluster.logs import job_log, section, verdict_in
from qurl_megatron.cluster.verdict import BAD_NODE, GOES_ON, Decision
from qurl_megatron.config import RunConfig
from qurl_megatron.kit.clock import now
from qurl_megatron.kit.errors import ConfigError, printable
from qurl_megatron.observe.attempts import Attempt, Step, Tried, run_metrics, steps_of, tried
from qurl_megatron.observe.hours import KINDS, Hours, Spent, hours_of
from qurl_megatron.observe.sinks import Record
from qurl_megatron.observe.text import duration, how_many, percent
from qurl_megatron.training.state import latest

RECENT = 20
"""Steps that medians are of."""

MEANINGS = {
    1: "a fault: no engine was left, a rank was lost, or the program failed",
    2: "a mistake in the input, or a full disk",
    3: "the guard, or numbers that are not finite, halted it",
    BAD_NODE: "a node that it needs is bad, and there is no other",
}
"""Meanings of the training step's exit codes; others are the codes of killed ranks."""


@dataclass(frozen=True)
class Facts:
    """All that a status follows from."""

    run_dir: Path
    config: RunConfig
    cluster: ClusterConfig
    jobs: Sequence[int]  # that were submitted last
    queue: dict[int, Queued] | None  # None: it cannot be asked
    queue_error: str = ""
    attempts: Sequence[Tried] = ()
    verdict: str = ""  # the supervisor's, on how the newest attempt ended
    records: Sequence[Record] = ()
    checkpoint: tuple[int, float] | None = None  # step of the newest, and when it was written


@dataclass(frozen=True)
class Status:
    """How a run is. Seconds, and numbers of steps; None: not known, or not yet."""

    run_dir: str
    state: str  # waiting, running, ended, unknown
    what: str  # the same as a sentence
    step: int
    steps: int
    next: str
    job: int | None = None
    attempt: int | None = None
    reward: float | None = None
    accuracy: float | None = None
    held_out_reward: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    step_s: float | None = None
    last_step_s: float | None = None  # since the last step ended
    serving: int | None = None
    engines: int = 0
    job_left_s: float | None = None
    steps_fit: int | None = None  # in the job's remaining time
    checkpoint: int | None = None
    checkpoint_s: float | None = None  # its age


def status(run_dir: Path, *, as_json: bool = False) -> int:
    """Print how a run is.

    Raises:
        ConfigError: nothing was submitted for it, or a record is damaged.
    """
    description = describe(gather(run_dir), now())
    print(json.dumps(asdict(description), indent=1) if as_json else printable(render(description)))
    return 0


def gather(run_dir: Path) -> Facts:
    jobs = folder.jobs(run_dir)
    if not jobs:
        raise folder.no_job(run_dir)
    queue, queue_error = None, ""
    try:
        queue = commands.queued(jobs)
    except ConfigError as error:  # the folder tells the rest
        queue_error = str(error)
    newest, attempts = latest(run_dir), tried(run_dir)
    number = attempts[-1].number if attempts else 0
    return Facts(
        run_dir,
        folder.recipe(run_dir),
        folder.cluster(run_dir),
        jobs,
        queue,
        queue_error,
        attempts,
        verdict_in(section(job_log(run_dir), number), number),
        run_metrics(run_dir),
        (int(newest.name.removeprefix("step_")), newest.stat().st_mtime) if newest else None,
    )


def describe(facts: Facts, at: float) -> Status:
    """Work out a run's status.

    Args:
        at: now, Unix seconds.
    """
    job = _job(facts)
    newest = facts.attempts[-1] if facts.attempts else None
    state, sentence = _state(facts, job, newest, at)
    values: dict = {"step": 0}
    steps = steps_of(facts.records)
    if steps:
        step_s = median(step.seconds for step in steps[-RECENT:])
        values.update(step=steps[-1].step, step_s=step_s, last_step_s=at - steps[-1].ended_at)
    if newest:
        values.update(attempt=newest.number, job=newest.ended.job if newest.ended else None)
    if job:
        values["job"] = job.job
    if facts.checkpoint:
        values.update(checkpoint=facts.checkpoint[0], checkpoint_s=at - facts.checkpoint[1])
    if state == "running" and job and job.ends:
        left_s = job.ends - at
        values["job_left_s"] = left_s
        if newest and (step_s := _seconds_per_step(newest.steps)):
            fit = max(0, math.floor((left_s - facts.cluster.job.signal_s) / step_s))
            values["steps_fit"] = min(fit, facts.config.train.steps - values["step"])
    serving = _last(facts.records, "fleet/serving")
    return Status(
        run_dir=str(facts.run_dir),
        state=state,
        what=sentence,
        steps=facts.config.train.steps,
        next=_next(facts, state, newest, job),
        reward=_last(facts.records, "reward/mean"),
        accuracy=_last(facts.records, "eval/accuracy"),
        held_out_reward=_last(facts.records, "eval/reward"),
        phases=_phases(facts.records),
        serving=None if serving is None else int(serving),
        engines=facts.config.rollout.engines or len(facts.config.rollout.urls),
        **values,
    )


def _seconds_per_step(steps: Sequence[Step]) -> float:
    """Return the mean time from step to step of one attempt, saving and evaluating included."""
    recent = steps[-RECENT:]
    if len(recent) < 2:
        return 0.0
    return (recent[-1].ended_at - recent[0].ended_at) / (len(recent) - 1)


def render(status: Status) -> str:
    """Return the lines for an operator."""
    lines = [f"{status.run_dir}: {status.what}"]
    running = status.state == "running"
    progress = [f"step {status.step} of {status.steps}"]
    if status.last_step_s is not None and running:
        progress.append(f"the last {duration(status.last_step_s)} ago")
    if status.reward is not None:
        progress.append(f"reward {status.reward:.3f}")
    if status.accuracy is not None:
        progress.append(f"held-out accuracy {percent(status.accuracy)}")
    if status.held_out_reward is not None:
        progress.append(f"held-out reward {status.held_out_reward:.3f}")
    lines.append(_row("progress", ", ".join(progress)))
    if status.step_s is not None:
        phases = ", ".join(f"{name} {duration(s)}" for name, s in status.phases.items())
        lines.append(_row("a step", f"{duration(status.step_s)}: {phases} (medians)"))
    if status.serving is not None and running:
        lines.append(_row("engines", f"{status.serving} of {status.engines} serve"))
    if status.job_left_s is not None:
        lines.append(_row("this job", _left(status, status.job_left_s)))
    if status.checkpoint is not None and status.checkpoint_s is not None:
        age = duration(max(status.checkpoint_s, 0.0))
        lines.append(_row("checkpoint", f"of step {status.checkpoint}, {age} old"))
    lines.append(_row("next", status.next))
    return "\n".join(lines)


def _row(name: str, text: str) -> str:
    return f"  {name:<11} {text}"


def _left(status: Status, seconds: float) -> str:
    text = f"{duration(max(seconds, 0.0))} left"
    missing = status.steps - status.step
    if missing <= 0:
        return f"{text}; all steps are done"
    if status.steps_fit is None:
        return text
    text += f", room for {how_many(status.steps_fit, 'more step')}"
    if status.steps_fit == missing:
        return f"{text}: enough for the {missing} that are missing"
    return f"{text}, of {missing} that are missing"


def _job(facts: Facts) -> Queued | None:
    """Return the job to look at: the one that runs, else the first of the queue."""
    queue = facts.queue or {}
    queued = [queue[job] for job in facts.jobs if job in queue]
    for entry in queued:
        if entry.state != "PENDING":
            return entry
    return queued[0] if queued else None


def _state(facts: Facts, job: Queued | None, newest: Tried | None, at: float) -> tuple[str, str]:
    """Return the state, and the same as a sentence."""
    attempt = f", attempt {newest.number}" if newest else ""
    if job and job.state == "PENDING":
        reason = f" ({job.reason})" if job.reason else ""
        starts = f", expected to start in {duration(job.starts - at)}" if job.starts > at else ""
        return "waiting", f"waiting, job {job.job}{reason}{starts}{attempt}"
    if job:
        return "running", f"{job.state.lower()}, job {job.job} on {job.nodes}{attempt}"
    if newest and newest.ended:
        ended = newest.ended
        if facts.queue is not None or ended.decision not in GOES_ON:
            return "ended", f"ended, job {ended.job}{attempt}: {_ending(ended, facts.verdict)}"
    if facts.queue is None:
        circumstances = (
            f"{attempt} of this folder has not ended" if newest else ", no attempt has begun"
        )
        return "unknown", f"the queue cannot be asked ({facts.queue_error}){circumstances}"
    ids = ", ".join(map(str, facts.jobs))
    if newest is None:
        return "ended", f"job {ids} has left the queue without an attempt"
    return "ended", f"job {ids} has left the queue in attempt {newest.number}, without a last word"


def _ending(ended: Attempt, verdict: str) -> str:
    """Return how an attempt ended, in the supervisor's words where there are any."""
    if not ended.code:
        return verdict or f"step {ended.step_after} is saved ({ended.decision})"
    meaning = MEANINGS.get(ended.code, f"a rank was killed, exit code {ended.code}")
    return f"{verdict} ({meaning})" if verdict else meaning


def _next(facts: Facts, state: str, newest: Tried | None, job: Queued | None) -> str:
    """Return the next thing to do."""
    run_dir = facts.run_dir
    if state == "waiting" and job is not None:
        return f"squeue --start --jobs={job.job}; or `qurl slurm cancel {run_dir}`"
    if state == "running":
        return f"tail -F {run_dir}/slurm/job.log {run_dir}/slurm/latest/train-0.log"
    if state == "unknown":
        return f"`qurl slurm status {run_dir}` on a login node of the cluster"
    if newest is None:
        sources = f"{run_dir}/slurm/job.log, or `sacct -j {facts.jobs[0]}`, says why"
    elif newest.ended and newest.ended.decision == Decision.DONE:
        return f"{run_dir}/report.html; `qurl slurm hours {run_dir}`"
    else:
        sources = f"`qurl slurm logs {run_dir}` says why"
    return f"{sources}; `qurl slurm submit`, as before, goes on"


def _phases(records: Sequence[Record]) -> dict[str, float]:
    """Return the median seconds of each phase that matters, the longest first."""
    timed = [record.metrics for record in records if "time/step" in record.metrics][-RECENT:]
    names = {name for metrics in timed for name in metrics if name.startswith("time/")}
    medians = {}
    for name in sorted(names - {"time/step"}):
        medians[name.removeprefix("time/")] = median(m.get(name, 0.0) for m in timed)
    threshold = 0.01 * max(medians.values(), default=0.0)
    longest = sorted(medians.items(), key=lambda item: -item[1])
    return {name: seconds for name, seconds in longest if seconds > threshold}


def _last(records: Sequence[Record], name: str) -> float | None:
    for record in reversed(records):
        if name in record.metrics:
            return record.metrics[name]
    return None


# ---- GPU-hours


def hours(run_dir: Path, *, as_json: bool = False) -> int:
    """Print where the GPU-hours of a run went.

    Raises:
        ConfigError: no attempt has begun, or a record is damaged.
    """
    table = hours_of(run_dir)
    if not table.rows:
        raise folder.no_attempt(run_dir)
    print(json.dumps(hours_as_data(table), indent=1) if as_json else render_hours(table))
    return 0


def hours_as_data(table: Hours) -> dict:
    """Return GPU-hours, by attempt and of all."""
    rows = []
    for row in table.rows:
        rows.append({"attempt": row.number, "gpus": row.gpus, **_rounded(row.hours)})
    return {
        "attempts": rows,
        "all": _rounded(table.total),
        "samples": table.samples,
        "per_sample": table.per_sample,
    }


def render_hours(table: Hours) -> str:
    names = ["GPUs", *(kind.replace("_", " ") for kind in KINDS), "all"]
    lines = ["GPU-hours" + "".join(f"{name:>10}" for name in names)]
    for row in table.rows:
        lines.append(_hours_row(f"attempt {row.number}", str(row.gpus), row.hours))
    total = table.total
    lines.append(_hours_row("all", "", total))
    if total.total:
        shares = [f"{getattr(total, kind) / total.total:10.1%}" for kind in KINDS]
        lines.append(f"{'':19}{''.join(shares)}")
    if table.per_sample is not None:
        lines.append(
            f"{table.samples:,.0f} samples were trained on: {table.per_sample:.3g} GPU-hours each"
        )
    return "\n".join(lines)


def _hours_row(name: str, gpus: str, spent: Spent) -> str:
    values = (*asdict(spent).values(), spent.total)
    return f"{name:<9}{gpus:>10}" + "".join(f"{value:10.4f}" for value in values)


def _rounded(spent: Spent) -> dict[str, float]:
    rounded = {kind: round(value, 6) for kind, value in asdict(spent).items()}
    return {**rounded, "all": round(spent.total, 6)}
