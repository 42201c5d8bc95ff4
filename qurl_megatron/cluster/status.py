"""``qurl slurm status``: how a run is, what is left of it, and what to do next.

``describe`` is a function of what the folder, the metrics and the queue say, and of the time. The
queue may be out of reach, as on a machine without Slurm: the folder tells the rest.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median

from qurl_megatron.cluster import commands, folder
from qurl_megatron.cluster.cluster import ClusterConfig
from qurl_megatron.cluster.commands import Queued
from qurl_megatron.cluster.logs import job_log, section, word
from qurl_megatron.cluster.task import STOPPED
from qurl_megatron.cluster.verdict import BAD_NODE, GOES_ON, NO_PROGRESS, WALL_TIME
from qurl_megatron.config import RunConfig
from qurl_megatron.kit.clock import now
from qurl_megatron.kit.errors import ConfigError, printable
from qurl_megatron.observe.attempts import Attempt, Step, Tried, run_metrics, steps_of, tried
from qurl_megatron.observe.sinks import Record
from qurl_megatron.observe.text import duration, how_many, percent
from qurl_megatron.training.state import latest

RECENT = 20
"""Steps that medians are of."""

ENDED = {
    1: "a fault: no engine was left, a rank was lost, or the program failed",
    2: "a mistake in the input, or a full disk",
    3: "the guard, or numbers that are not finite, halted it",
    NO_PROGRESS: "no progress: another attempt would end likewise",
    BAD_NODE: "a node that it needs is bad, and there is no other",
    STOPPED: "it was cancelled, and has saved",
}
"""What exit codes mean, in short; others are those of a rank that was killed."""


@dataclass(frozen=True)
class Facts:
    """All that a status follows from."""

    run_dir: Path
    config: RunConfig
    cluster: ClusterConfig
    jobs: Sequence[int]  # that were submitted last
    queue: dict[int, Queued] | None  # None: it cannot be asked
    unasked: str = ""  # why not
    attempts: Sequence[Tried] = ()
    logged: bool = False  # job.log has something
    word: str = ""  # the supervisor's, on how the newest attempt ended
    records: Sequence[Record] = ()
    checkpoint: tuple[int, float] | None = None  # step of the newest, and when it was written


@dataclass(frozen=True)
class RecentPace:
    """Seconds, of the last steps."""

    step: float  # the median of a step itself
    save: float  # the median of what comes between two where the first is saved; 0: none was
    all_in: float  # of a step with its share of saving and evaluating


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
    save_s: float | None = None
    last_step_s: float | None = None  # since the last step ended
    serving: int | None = None
    engines: int = 0
    job_left_s: float | None = None
    steps_fit: int | None = None  # in what is left of the job
    jobs_more: int | None = None  # that the run needs behind it
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
    submitted = folder.submitted(run_dir)
    if submitted is None:
        raise folder.no_job(run_dir)
    queue, unasked = None, ""
    try:
        queue = commands.queued(submitted.jobs)
    except ConfigError as error:  # the folder tells what is known without it
        unasked = str(error)
    newest, attempts, log = latest(run_dir), tried(run_dir), job_log(run_dir)
    number = attempts[-1].number if attempts else 0
    return Facts(
        run_dir,
        folder.recipe(run_dir),
        folder.cluster(run_dir),
        submitted.jobs,
        queue,
        unasked,
        attempts,
        bool(log),
        word(section(log, number), number),
        run_metrics(run_dir),
        (int(newest.name.removeprefix("step_")), newest.stat().st_mtime) if newest else None,
    )


def describe(facts: Facts, at: float) -> Status:
    """
    Args:
        at: now, Unix seconds.
    """
    job = _job(facts)
    newest = facts.attempts[-1] if facts.attempts else None
    state, sentence = _state(facts, job, newest, at)
    steps = steps_of(facts.records)
    done = steps[-1].step if steps else 0
    timing = pace(steps[-RECENT:], facts.config.checkpoint.every)
    seconds_left = job.ends - at if state == "running" and job and job.ends else None
    fit, more = _fit(facts, newest, timing, seconds_left, facts.config.train.steps - done)
    saved = facts.checkpoint
    serving = _last(facts.records, "fleet/serving")
    return Status(
        run_dir=str(facts.run_dir),
        state=state,
        what=sentence,
        step=done,
        steps=facts.config.train.steps,
        next=_next(facts, state, newest, job),
        job=job.job if job else newest.ended.job if newest and newest.ended else None,
        attempt=newest.number if newest else None,
        reward=_last(facts.records, "reward/mean"),
        accuracy=_last(facts.records, "eval/accuracy"),
        held_out_reward=_last(facts.records, "eval/reward"),
        phases=_phases(facts.records),
        step_s=timing.step if timing else None,
        save_s=timing.save if timing else None,
        last_step_s=at - steps[-1].ended_at if steps else None,
        serving=None if serving is None else int(serving),
        engines=facts.config.rollout.engines or len(facts.config.rollout.urls),
        job_left_s=seconds_left,
        steps_fit=fit,
        jobs_more=more,
        checkpoint=saved[0] if saved else None,
        checkpoint_s=at - saved[1] if saved else None,
    )


def pace(steps: Sequence[Step], every: int) -> RecentPace | None:
    """How long steps take; None before the first.

    Args:
        every: steps between two checkpoints, 0 for none.
    """
    if not steps:
        return None
    pairs = [(a, b) for a, b in zip(steps, steps[1:], strict=False) if b.step == a.step + 1]
    between = [max(b.ended_at - a.ended_at - b.seconds, 0.0) for a, b in pairs]
    saving = [s for s, (a, _) in zip(between, pairs, strict=True) if every and a.step % every == 0]
    step = median(past.seconds for past in steps)
    return RecentPace(
        step, median(saving) if saving else 0.0, step + (mean(between) if between else 0.0)
    )


def render(found: Status) -> str:
    """What an operator reads."""
    lines = [f"{found.run_dir}: {found.what}"]
    reached = [f"step {found.step} of {found.steps}"]
    if found.last_step_s is not None and found.state == "running":
        reached.append(f"the last {duration(found.last_step_s)} ago")
    if found.reward is not None:
        reached.append(f"reward {found.reward:.3f}")
    if found.accuracy is not None:
        reached.append(f"held-out accuracy {percent(found.accuracy)}")
    if found.held_out_reward is not None:
        reached.append(f"held-out reward {found.held_out_reward:.3f}")
    lines.append(_row("progress", ", ".join(reached)))
    if found.step_s is not None:
        phases = ", ".join(f"{name} {duration(s)}" for name, s in found.phases.items())
        lines.append(_row("a step", f"{duration(found.step_s)}: {phases} (medians)"))
    if found.serving is not None and found.state == "running":
        lines.append(_row("engines", f"{found.serving} of {found.engines} serve"))
    if found.job_left_s is not None:
        lines.append(_row("this job", _left(found, found.job_left_s)))
    if found.checkpoint is not None and found.checkpoint_s is not None:
        age = duration(max(found.checkpoint_s, 0.0))
        lines.append(_row("checkpoint", f"of step {found.checkpoint}, {age} old"))
    lines.append(_row("next", found.next))
    return "\n".join(lines)


def _row(name: str, text: str) -> str:
    return f"  {name:<11} {text}"


def _left(found: Status, seconds: float) -> str:
    text = f"{duration(max(seconds, 0.0))} left"
    missing = found.steps - found.step
    if missing <= 0:
        return f"{text}; all steps are done"
    if found.steps_fit is None:
        return text
    saving = f" and {duration(found.save_s)} for saving" if found.save_s else ""
    text += f", room for {how_many(found.steps_fit, 'more step')}{saving}"
    if not found.jobs_more:
        return f"{text}: enough for the {missing} that are missing"
    return f"{text}, of {missing} that are missing: {how_many(found.jobs_more, 'more job')}"


def _job(facts: Facts) -> Queued | None:
    """The job to look at: the one that runs, else the first of the queue."""
    queue = facts.queue or {}
    queued = [queue[job] for job in facts.jobs if job in queue]
    running = [queued_job for queued_job in queued if queued_job.state != "PENDING"]
    return next(iter(running or queued), None)


def _state(facts: Facts, job: Queued | None, newest: Tried | None, at: float) -> tuple[str, str]:
    tries = f", attempt {newest.number}" if newest else ""
    if job and job.state == "PENDING":
        starts = f", expected to start in {duration(job.starts - at)}" if job.starts > at else ""
        reason = f" ({job.reason})" if job.reason else ""
        return "waiting", f"waiting, job {job.job}{reason}{starts}{tries}"
    if job:
        word = "running" if job.state == "RUNNING" else job.state.lower()
        return "running", f"{word}, job {job.job} on {job.nodes}{tries}"
    if (
        newest
        and newest.ended
        and (facts.queue is not None or newest.ended.decision not in GOES_ON)
    ):
        return (
            "ended",
            f"ended, job {newest.ended.job}{tries}: {_ending(newest.ended, facts.word)}",
        )
    if facts.queue is None:
        circumstances = (
            f"{tries} of this folder has not ended" if newest else ", no attempt has begun"
        )
        return "unknown", f"the queue cannot be asked ({facts.unasked}){circumstances}"
    ids = ", ".join(map(str, facts.jobs))
    if newest is None:
        return "ended", f"job {ids} has left the queue without an attempt"
    return "ended", f"job {ids} has left the queue in attempt {newest.number}, without a last word"


def _ending(ended: Attempt, word: str) -> str:
    """In the supervisor's words, where there are any."""
    killed = f"a rank was killed, exit code {ended.code}"
    if word:
        return f"{word} ({ENDED.get(ended.code, killed)})" if ended.code else word
    if ended.decision == "done":
        return "all steps are done"
    if ended.decision in GOES_ON:
        return f"step {ended.step_after} is saved, and no job is left that goes on"
    code = ended.code or (NO_PROGRESS if ended.signal == WALL_TIME else STOPPED)
    return f"{ENDED.get(code, killed)}; step {ended.step_after} is saved"


def _next(facts: Facts, state: str, newest: Tried | None, job: Queued | None) -> str:
    run_dir = facts.run_dir
    if state == "waiting" and job is not None:
        return f"squeue --start --jobs={job.job}; or `qurl slurm cancel {run_dir}`"
    if state == "running":
        return f"tail -F {run_dir}/slurm/job.log {run_dir}/slurm/latest/train-0.log"
    if state == "unknown":
        return f"`qurl slurm status {run_dir}` on a login node of the cluster"
    if newest is None:
        if facts.logged:
            return f"{run_dir}/slurm/job.log says why"
        number = facts.jobs[0]
        return (
            f"`scontrol show job {number}`, or later `sacct -j {number}`, says why; "
            "`qurl slurm submit`, as before, submits it again"
        )
    if newest.ended and newest.ended.decision == "done":
        return f"{run_dir}/report.html; `qurl slurm hours {run_dir}`"
    if newest.ended and newest.ended.decision == "stop" and newest.ended.signal == WALL_TIME:
        return "raise job.time_limit or job.signal_s in the cluster file, then `qurl slurm submit`"
    if newest.ended and (newest.ended.decision in GOES_ON or newest.ended.signal):
        return "`qurl slurm submit`, as before, goes on"
    return f"`qurl slurm logs {run_dir}` says why; `qurl slurm submit`, as before, goes on"


def _fit(
    facts: Facts, newest: Tried | None, timing: RecentPace | None, left: float | None, missing: int
) -> tuple[int | None, int | None]:
    """Steps that fit in what is left of the job, and jobs that the run needs behind it."""
    if left is None or timing is None or timing.all_in <= 0:
        return None, None
    job = facts.cluster.job
    fit = max(0, math.floor((left - job.signal_s) / timing.all_in))
    set_up = 0.0
    if newest and newest.steps:
        first = newest.steps[0]
        set_up = max(first.ended_at - first.seconds - newest.began.began_at, 0.0)
    each = max(1, math.floor((job.time_limit_s - job.signal_s - set_up) / timing.all_in))
    return min(fit, missing), math.ceil(max(missing - fit, 0) / each)


def _phases(records: Sequence[Record]) -> dict[str, float]:
    """The median seconds of each phase that matters, the longest first."""
    timed = [record.metrics for record in records if "time/step" in record.metrics][-RECENT:]
    names = {name for metrics in timed for name in metrics if name.startswith("time/")} - {
        "time/step"
    }
    medians = {
        name.removeprefix("time/"): median(metrics.get(name, 0.0) for metrics in timed)
        for name in names
    }
    longest = sorted(medians.items(), key=lambda item: (-item[1], item[0]))
    return {name: seconds for name, seconds in longest if seconds > 0.01 * longest[0][1]}


def _last(records: Sequence[Record], name: str) -> float | None:
    return next(
        (record.metrics[name] for record in reversed(records) if name in record.metrics), None
    )
