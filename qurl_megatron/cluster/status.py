"""``qurl slurm status``: how a run is.

``describe`` is a function of the folder, the metrics, the queue and the time. The queue may be out
of reach, as on a machine without Slurm: the folder tells the rest.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from qurl_megatron.cluster import commands, folder
from qurl_megatron.cluster.commands import Queued
from qurl_megatron.cluster.folder import Attempt
from qurl_megatron.cluster.verdict import GOES_ON, Decision
from qurl_megatron.config import RunConfig
from qurl_megatron.kit.clock import now
from qurl_megatron.kit.errors import ConfigError, printable
from qurl_megatron.observe.sinks import Record, read_metrics
from qurl_megatron.observe.text import duration
from qurl_megatron.training.state import latest

RECENT = 20
"""Steps that medians are of."""


@dataclass(frozen=True)
class Facts:
    """All that a status follows from."""

    run_dir: Path
    config: RunConfig
    job: int  # that was submitted last
    queued: Queued | None = None  # None: it is not in the queue, or that cannot be asked
    queue_error: str = ""  # why the queue cannot be asked
    attempts: Sequence[Attempt] = ()
    records: Sequence[Record] = ()
    checkpoint: tuple[int, float] | None = None  # step of the newest, and when it was written


@dataclass(frozen=True)
class Status:
    """How a run is. Seconds, and numbers of steps; None: not known, or not yet."""

    run_dir: str
    state: str  # waiting, running, ended, unknown
    what: str  # the same as a sentence
    next: str
    job: int
    attempt: int | None
    step: int
    steps: int
    reward: float | None
    step_s: float | None = None
    last_step_s: float | None = None  # since the last step ended
    job_left_s: float | None = None
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
    """Read what the folder and the queue tell."""
    job, queued, queue_error = folder.job(run_dir), None, ""
    try:
        queued = commands.queued(job)
    except ConfigError as error:  # the folder tells the rest
        queue_error = str(error)
    attempts = folder.attempts(run_dir)
    metrics = run_dir / "metrics.jsonl"
    # A file that has only been begun holds no line, which is no mistake here.
    has_lines = metrics.is_file() and b"\n" in metrics.read_bytes()
    checkpoint = None
    if newest := latest(run_dir):
        checkpoint = int(newest.name.removeprefix("step_")), newest.stat().st_mtime
    return Facts(
        run_dir,
        folder.recipe(run_dir),
        job,
        queued,
        queue_error,
        attempts,
        read_metrics(metrics) if has_lines else [],
        checkpoint,
    )


def describe(facts: Facts, at: float) -> Status:
    """Work out a run's status.

    Args:
        at: now, Unix seconds.
    """
    newest = facts.attempts[-1] if facts.attempts else None
    state, sentence = _state(facts, newest, at)
    steps = [record for record in facts.records if "time/step" in record.metrics]
    values: dict = {}
    if steps:
        values["step_s"] = median(record.metrics["time/step"] for record in steps[-RECENT:])
        values["last_step_s"] = at - steps[-1].time
    if facts.checkpoint:
        values.update(checkpoint=facts.checkpoint[0], checkpoint_s=at - facts.checkpoint[1])
    if state == "running" and facts.queued and facts.queued.ends:
        values["job_left_s"] = facts.queued.ends - at
    return Status(
        run_dir=str(facts.run_dir),
        state=state,
        what=sentence,
        next=_next(facts, state, newest),
        job=facts.job,
        attempt=newest.number if newest else None,
        step=steps[-1].step if steps else 0,
        steps=facts.config.train.steps,
        reward=_last(facts.records, "reward/mean"),
        **values,
    )


def render(status: Status) -> str:
    """Return the lines for an operator."""
    lines = [f"{status.run_dir}: {status.what}"]
    running = status.state == "running"
    progress = [f"step {status.step} of {status.steps}"]
    if status.last_step_s is not None and running:
        progress.append(f"the last {duration(status.last_step_s)} ago")
    if status.reward is not None:
        progress.append(f"reward {status.reward:.3f}")
    lines.append(_row("progress", ", ".join(progress)))
    if status.step_s is not None:
        lines.append(_row("a step", f"{duration(status.step_s)} (median)"))
    if status.job_left_s is not None:
        lines.append(_row("this job", f"{duration(max(status.job_left_s, 0.0))} left"))
    if status.checkpoint is not None and status.checkpoint_s is not None:
        age = duration(max(status.checkpoint_s, 0.0))
        lines.append(_row("checkpoint", f"of step {status.checkpoint}, {age} old"))
    lines.append(_row("next", status.next))
    return "\n".join(lines)


def _row(name: str, text: str) -> str:
    return f"  {name:<11} {text}"


def _state(facts: Facts, newest: Attempt | None, at: float) -> tuple[str, str]:
    """Return the state, and the same as a sentence."""
    attempt = f", attempt {newest.number}" if newest else ""
    queued = facts.queued
    if queued and queued.state == "PENDING":
        reason = f" ({queued.reason})" if queued.reason else ""
        starts = ""
        if queued.starts and queued.starts > at:
            starts = f", expected to start in {duration(queued.starts - at)}"
        return "waiting", f"waiting, job {facts.job}{reason}{starts}{attempt}"
    if queued:
        return "running", f"{queued.state.lower()}, job {facts.job} on {queued.nodes}{attempt}"
    if newest and newest.ended and not (facts.queue_error and newest.decision in GOES_ON):
        return "ended", f"ended, job {newest.job}{attempt}: {newest.reason}"
    if facts.queue_error:
        last = f"{attempt} of this folder has not ended" if newest else ", no attempt has begun"
        return "unknown", f"the queue cannot be asked ({facts.queue_error}){last}"
    if newest is None:
        return "ended", f"job {facts.job} has left the queue without an attempt"
    return "ended", f"job {facts.job} has left the queue{attempt}, without a last word"


def _next(facts: Facts, state: str, newest: Attempt | None) -> str:
    """Return the next thing to do."""
    run_dir = facts.run_dir
    if state == "waiting":
        return f"squeue --start --jobs={facts.job}; or `qurl slurm cancel {run_dir}`"
    if state == "running":
        return f"tail -F {run_dir}/slurm/job.log {run_dir}/slurm/latest/train-0.log"
    if state == "unknown":
        return f"`qurl slurm status {run_dir}` on a login node of the cluster"
    if newest and newest.decision == Decision.DONE:
        return f"{run_dir}/report.html"
    sources = f"`qurl slurm logs {run_dir}` says why"
    if newest is None:
        sources = f"{run_dir}/slurm/job.log, or `sacct -j {facts.job}`, says why"
    return f"{sources}; `qurl slurm submit`, as before, goes on"


def _last(records: Sequence[Record], name: str) -> float | None:
    for record in reversed(records):
        if name in record.metrics:
            return record.metrics[name]
    return None
