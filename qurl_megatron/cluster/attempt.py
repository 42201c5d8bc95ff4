"""``qurl slurm attempt``: the supervisor of a job, which its script calls.

It starts the ranks and watches over them. After an attempt it ends, tries again, continues the run
in another job, or stops for a person to look. It needs no GPU, no torch and no Megatron.
"""

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from qurl_megatron.cluster import commands, folder
from qurl_megatron.cluster.cluster import ClusterConfig
from qurl_megatron.cluster.examination import examine, excluding, refuse_exclusion
from qurl_megatron.cluster.layout import Allocation, lay_out, run_steps
from qurl_megatron.cluster.supervise import Received, StepSupervisor, beside, facts_of, say
from qurl_megatron.cluster.verdict import BAD_NODE, GOES_ON, PERSONS, WALL_TIME, Decision, decide
from qurl_megatron.config import RunConfig
from qurl_megatron.fleet.offered import prepare
from qurl_megatron.kit.clock import now
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.place import forget
from qurl_megatron.observe import failures

LINGER_S = 300.0
"""Seconds to wait for Slurm to end the supervisor of a requeued job. If the supervisor exits before
that, Slurm 22.05 takes the job for completed and never starts it again."""
LOST = 1
"""Exit code in the record of an attempt whose real one is unknown."""


@dataclass(frozen=True)
class BatchJob:
    """The job that this process supervises."""

    number: int
    restarts: int  # how often Slurm has started it again
    run_dir: Path
    config: RunConfig
    cluster: ClusterConfig

    @property
    def layout(self) -> Allocation:
        return lay_out(self.config.parallel, self.config.rollout, self.cluster.node)


def attempt(run_dir: Path) -> int:
    """Run the training step of this job, again after a failure; then requeue the job or end it.

    Returns:
        0 if the run is done or goes on in another job; 143 after a clean stop on request; 4 if a
        retry would make no progress; else the exit code of the training step.

    Raises:
        ConfigError: this is not a job, or ``qurl slurm submit`` did not submit it.
    """
    job = _own_job(run_dir)
    lost = _settle_lost_attempt(job)
    if lost and lost.decision == Decision.STOP:
        return lost.exit_code
    with Received() as received:
        while True:
            saved = folder.saved_step(run_dir)
            if saved >= job.config.train.steps > 0:
                say(f"{run_dir} has all its {saved} steps")
                return 0
            ended = _make_attempt(job, saved, received)
            retries_here = ended.decision == Decision.RETRY and not received.newest
            if not (retries_here and _has_all_nodes(job)):
                break
        _follow(ended, job, received.newest)
    return ended.exit_code


def _make_attempt(job: BatchJob, saved: int, received: Received) -> folder.Attempt:
    """Make one attempt, from its folder to its record; step ``saved`` is in the checkpoint."""
    attempt = folder.open_attempt(job.run_dir, job=job.number, step=saved)
    logs = folder.attempt_folder(job.run_dir, attempt.number).absolute()
    os.environ[failures.FOLDER] = str(logs)  # srun passes it on to the ranks
    say(
        f"attempt {attempt.number}, job {job.number}, from step {saved}; "
        f"the ranks write {logs}/train-RANK.log"
    )
    faults = examine(
        job.run_dir, job.layout, job.cluster, cancelled=lambda: received.newest in PERSONS
    )
    for node, fault in faults.items():
        say(f"node {node} is bad: {fault}")
    if received.newest in PERSONS:
        return _settle(job, replace(attempt, signal=received.newest))
    if faults and not received.newest:
        return _record(job, _without_bad_nodes(job, attempt, faults))
    ranks = job.config.parallel.world_size
    supervisor = StepSupervisor(job.run_dir, attempt, ranks, job.cluster.job, received)
    return _settle(job, _run(job, logs, supervisor))


def _run(job: BatchJob, logs: Path, supervisor: StepSupervisor) -> folder.Attempt:
    """Run the training step, and the engines' beside it where they have nodes of their own."""
    steps = run_steps(job.run_dir, job.layout, job.cluster, logs)
    forget(job.run_dir)  # left by a supervisor that was killed with its ranks
    with contextlib.ExitStack() as stack:
        stack.callback(forget, job.run_dir)
        if "engines" in steps:
            prepare(Path(job.config.rollout.rendezvous))
            stack.enter_context(beside(steps["engines"]))
        return supervisor.watch(steps["train"])


def _without_bad_nodes(
    job: BatchJob, attempt: folder.Attempt, faults: Mapping[str, str]
) -> folder.Attempt:
    """Return the attempt with its decision: go on without the bad nodes, or stop."""
    names, decision, exit_code = ", ".join(faults), Decision.STOP, BAD_NODE
    try:
        if len(faults) == job.layout.whole.nodes > 1:
            node, fault = next(iter(faults.items()))
            reason = (
                f"all {len(faults)} nodes are bad, so none is excluded: look at container and "
                f"site.prolog in the cluster file; {node}: {fault}; then "
                "`qurl slurm submit` again"
            )
        else:
            refuse_exclusion(job.run_dir, job.number, [*faults])
            decision, exit_code, reason = Decision.WITHOUT, 0, f"goes on without {names}"
    except ConfigError as error:
        reason = (
            f"{names} cannot be excluded ({error}); once the nodes are fixed, "
            "`qurl slurm submit`, as before, goes on"
        )
    return replace(
        attempt,
        step_after=attempt.step_before,
        code=BAD_NODE,
        decision=decision,
        exit_code=exit_code,
        reason=reason,
        bad_nodes=tuple(faults),
    )


def _settle_lost_attempt(job: BatchJob) -> folder.Attempt | None:
    """Settle an attempt whose supervisor was lost with its node or killed before it had settled it;
    return None if there is none."""
    attempts = folder.attempts(job.run_dir)
    # If Slurm has not restarted the job, a person ended the attempt's job and submitted this one.
    if not job.restarts or not attempts or attempts[-1].ended:
        return None
    failure = "its first node was lost, or taken before it had ended"
    return _settle(job, replace(attempts[-1], code=LOST, failure=failure))


def _settle(job: BatchJob, attempt: folder.Attempt) -> folder.Attempt:
    """Decide on an attempt that has ended, and write its record."""
    attempt = replace(attempt, step_after=folder.saved_step(job.run_dir))
    # Slurm's SIGTERM looks like a person's.
    if attempt.signal in PERSONS and _ended_by_slurm(job):
        failure = "Slurm has ended the job, as where a node is lost"
        attempt = replace(attempt, signal="", code=attempt.code or LOST, failure=failure)
    before = None
    for other in folder.attempts(job.run_dir):
        if other.ended and other.number < attempt.number:
            before = other
    return _record(job, decide(attempt, before, steps=job.config.train.steps))


def _record(job: BatchJob, attempt: folder.Attempt) -> folder.Attempt:
    attempt = replace(attempt, ended_at=now())
    folder.write_attempt(job.run_dir, attempt)
    say(f"attempt {attempt.number}: {attempt.reason}")
    return attempt


def _has_all_nodes(job: BatchJob) -> bool:
    """Return whether no node is gone: with --no-kill, Slurm takes failed ones out of the job."""
    nodes = str(job.layout.whole.nodes)
    nodes_left = facts_of(job.number).get("NumNodes", nodes)  # no answer: as submitted
    if nodes_left.partition("-")[0] == nodes:
        return True
    say(f"job {job.number} has {nodes_left} of its {nodes} nodes left")
    return False


def _ended_by_slurm(job: BatchJob) -> bool:
    """Return whether Slurm ends this job: a node is lost, or a preemption's grace time is over.

    If it may requeue the job, it has done so already.
    """
    return int(facts_of(job.number).get("Restarts", "0")) > job.restarts


def _follow(ended: folder.Attempt, job: BatchJob, received: str) -> None:
    """Continue the run in another job, or make sure that Slurm does not."""
    ended_by_slurm = received in PERSONS and _ended_by_slurm(job)
    goes_on = ended.decision == Decision.AGAIN
    if ended.decision in GOES_ON and (ended_by_slurm or received in ("", WALL_TIME)):
        goes_on = True
    if ended_by_slurm and not goes_on:
        commands.cancel(job.number)
    elif ended_by_slurm:
        say(f"job {job.number} is back in the queue")
        time.sleep(LINGER_S)
    elif goes_on:
        next_job = _queue_again(job)
        if ended.bad_nodes:  # a job that runs cannot be kept off a node, one that waits can
            commands.exclude(next_job, excluding(job.number, ended.bad_nodes))


def _queue_again(job: BatchJob) -> int:
    """Requeue the job, or submit it anew where the site forbids that; return the next one's id."""
    # Slurm sends SIGTERM to a requeued job, which must not end us or scontrol halfway.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        commands.requeue(job.number)
    except ConfigError as error:
        say(str(error))
        next_job = commands.submit(folder.script(job.run_dir), after=job.number)
        folder.write_job(job.run_dir, next_job)
        say(f"the run goes on in job {next_job}")
        return next_job
    say(f"job {job.number} goes back to the queue")
    return job.number


def _own_job(run_dir: Path) -> BatchJob:
    if "SLURM_JOB_ID" not in os.environ:
        raise ConfigError(
            "SLURM_JOB_ID is not set: `qurl slurm attempt` runs inside a job that "
            "`qurl slurm submit` submits"
        )
    number, restarts = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_RESTART_COUNT", "0")
    config, cluster = folder.recipe(run_dir), folder.cluster(run_dir)
    return BatchJob(int(number), int(restarts), run_dir, config, cluster)
