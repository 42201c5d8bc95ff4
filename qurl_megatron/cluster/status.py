"""``qurl slurm status``: a run's state, by its folder and the queue, which may be out of reach."""

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
from qurl_megatron.observe.sinks import METRICS_FILE, JsonlSink, Record
from qurl_megatron.observe.text import duration
from qurl_megatron.training.state import latest

RECENT = 20
"""Steps that a median covers."""


@dataclass(frozen=True)
class Facts:
    """Everything that a status follows from."""

    run_dir: Path
    config: RunConfig
    job: int  # that was submitted last
    queued: Queued | None = None  # None: it is not in the queue, or that cannot be asked
    queue_error: str = ""  # why the queue cannot be asked
    attempts: Sequence[Attempt] = ()
    records: Sequence[Record] = ()
    checkpoint: tuple[int, float] | None = None  # step of the newest, and when it was written


def status(run_dir: Path) -> int:
    """Print a run's state."""
    job, queued, queue_error = folder.job(run_dir), None, ""
    try:
        queued = commands.queued(job)
    except ConfigError as error:  # the folder tells the rest
        queue_error = str(error)
    checkpoint = None
    if newest := latest(run_dir):
        checkpoint = int(newest.name.removeprefix("step_")), newest.stat().st_mtime
    facts = Facts(
        run_dir,
        folder.recipe(run_dir),
        job,
        queued,
        queue_error,
        folder.attempts(run_dir),
        JsonlSink.read(run_dir / METRICS_FILE),  # none yet is no mistake here
        checkpoint,
    )
    print(printable(render(facts, now())))
    return 0


def render(facts: Facts, at: float) -> str:
    """Return the lines for an operator; ``at`` is the present, in Unix seconds."""
    sentence, what_next = _state(facts, at)
    running = facts.queued is not None and facts.queued.state != "PENDING"
    rows = []
    steps = [record for record in facts.records if "time/step" in record.metrics]
    progress = f"of {facts.config.train.steps}"
    if not steps:
        rows.append(("progress", f"step 0 {progress}"))
    else:
        if running:
            progress += f", the last {duration(at - steps[-1].time)} ago"
        progress += f", reward {steps[-1].metrics['reward/mean']:.3f}"
        rows.append(("progress", f"step {steps[-1].step} {progress}"))
        usual_s = median(record.metrics["time/step"] for record in steps[-RECENT:])
        rows.append(("a step", f"{duration(usual_s)} (median)"))
    if running and facts.queued and facts.queued.ends:
        left_s = max(facts.queued.ends - at, 0.0)
        rows.append(("this job", f"{duration(left_s)} left"))
    if facts.checkpoint:
        step, written_at = facts.checkpoint
        age = duration(max(at - written_at, 0.0))
        rows.append(("checkpoint", f"of step {step}, {age} old"))
    rows.append(("next", what_next))
    lines = [f"  {name:<11} {text}" for name, text in rows]
    return "\n".join([f"{facts.run_dir}: {sentence}", *lines])


def _state(facts: Facts, at: float) -> tuple[str, str]:
    """Return the state as a sentence, and the next thing to do."""
    run_dir, job, queued = facts.run_dir, facts.job, facts.queued
    newest, attempt = None, ""
    if facts.attempts:
        newest = facts.attempts[-1]
        attempt = f", attempt {newest.number}"
    if queued and queued.state == "PENDING":
        sentence = f"waiting, job {job}"
        if queued.reason:
            sentence += f" ({queued.reason})"
        if queued.starts and queued.starts > at:
            sentence += f", expected to start in {duration(queued.starts - at)}"
        what_next = f"squeue --start --jobs={job}; or `qurl slurm cancel {run_dir}`"
        return sentence + attempt, what_next
    if queued:
        what_next = f"tail -F {run_dir}/slurm/job.log {run_dir}/slurm/latest/train-0.log"
        return f"{queued.state.lower()}, job {job} on {queued.nodes}{attempt}", what_next
    if facts.queue_error and not (newest and newest.ended and newest.decision not in GOES_ON):
        last = ", no attempt has begun"
        if newest:
            last = f"{attempt} of this folder has not ended"
        what_next = f"`qurl slurm status {run_dir}` on a login node of the cluster"
        return f"the queue cannot be asked ({facts.queue_error}){last}", what_next
    if newest is None:
        sources = f"{run_dir}/slurm/job.log, or `sacct -j {job}`, says why"
        sentence = f"job {job} has left the queue without an attempt"
    else:
        sources = f"`qurl slurm logs {run_dir}` says why"
        sentence = f"job {job} has left the queue{attempt}, without a last word"
        if newest.ended:
            sentence = f"ended, job {newest.job}{attempt}: {newest.reason}"
        if newest.decision == Decision.DONE:
            return sentence, f"{run_dir}/report.html"
    return sentence, f"{sources}; `qurl slurm submit`, as before, goes on"
