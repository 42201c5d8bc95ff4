"""``qurl slurm status``: how a run is.

``render`` is a function of the folder, the metrics, the queue and the time. The queue may be out of
reach, as on a machine without Slurm: the folder tells the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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


def status(run_dir: Path) -> int:
    """Print how a run is.

    Raises:
        ConfigError: nothing was submitted for it, or a record is damaged.
    """
    print(printable(render(gather(run_dir), now())))
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


def render(facts: Facts, at: float) -> str:
    """Return the lines for an operator.

    Args:
        at: now, Unix seconds.
    """
    newest = facts.attempts[-1] if facts.attempts else None
    state, sentence = _state(facts, newest, at)
    running = state == "running"
    lines = [f"{facts.run_dir}: {sentence}"]
    steps = [record for record in facts.records if "time/step" in record.metrics]
    progress = [f"step {steps[-1].step if steps else 0} of {facts.config.train.steps}"]
    if steps and running:
        progress.append(f"the last {duration(at - steps[-1].time)} ago")
    if steps:
        progress.append(f"reward {steps[-1].metrics['reward/mean']:.3f}")
    lines.append(_row("progress", ", ".join(progress)))
    if steps:
        usual_s = median(record.metrics["time/step"] for record in steps[-RECENT:])
        lines.append(_row("a step", f"{duration(usual_s)} (median)"))
    if running and facts.queued and facts.queued.ends:
        left_s = max(facts.queued.ends - at, 0.0)
        lines.append(_row("this job", f"{duration(left_s)} left"))
    if facts.checkpoint:
        step, written_at = facts.checkpoint
        age = duration(max(at - written_at, 0.0))
        lines.append(_row("checkpoint", f"of step {step}, {age} old"))
    lines.append(_row("next", _next(facts, state, newest)))
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
