"""``qurl slurm attempt``: the supervisor of a job, which its script calls.

It starts the ranks, has them watched over, and then ends, tries again, has the run go on in another
job, or stops it for a person to look. It needs no GPU, and neither torch nor Megatron.
"""

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qurl_megatron.cluster import commands, folder
from qurl_megatron.cluster.cluster import ClusterConfig
from qurl_megatron.cluster.examination import examine, excluding, refuse_exclusion
from qurl_megatron.cluster.layout import Allocation, lay_out, rollout_step, training_step
from qurl_megatron.cluster.supervise import Received, StepSupervisor, beside, facts_of, say
from qurl_megatron.cluster.tasks import prepare
from qurl_megatron.cluster.verdict import (
    BAD_NODE,
    GOES_ON,
    PERSONS,
    WALL_TIME,
    Decision,
    Ending,
    Outcome,
    decide,
)
from qurl_megatron.config import RunConfig
from qurl_megatron.kit.clock import now
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.place import forget
from qurl_megatron.observe import failures
from qurl_megatron.training.state import TrainState, latest

LINGER_S = 300.0
"""In which Slurm ends a supervisor whose job it has put back into the queue. One that leaves by
itself before that completes the job there, and Slurm 22.05 never starts it again."""
LOST = 1
"""Exit code in the record of an attempt whose own nobody knows."""


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
        0 where the run is done, or goes on in another job; 143 after a clean stop that was asked
        for; 4 where another attempt would bring it no further; else the exit code of the training
        step.

    Raises:
        ConfigError: this is no job, or not one that ``qurl slurm submit`` has submitted.
    """
    number, restarts = _own_job(os.environ)
    job = BatchJob(number, restarts, run_dir, folder.recipe(run_dir), folder.cluster(run_dir))
    lost = _settle_lost_attempt(job)
    if lost and lost.decision is Decision.STOP:
        return lost.code
    with Received() as received:
        while True:
            saved = _saved_step(run_dir)
            if saved >= job.config.train.steps > 0:
                say(f"{run_dir} has all its {saved} steps")
                return 0
            outcome = _once(job, saved, received)
            retries_here = outcome.decision is Decision.RETRY and not received.newest
            if not (retries_here and _has_all_nodes(job)):
                break
        _follow(outcome, job, received.newest)
    return outcome.code


def _once(job: BatchJob, saved: int, received: Received) -> Outcome:
    """Make one attempt, from its folder to its record.

    Args:
        saved: step of the checkpoint that it goes on from.
    """
    begun = folder.open_attempt(job.run_dir, job=job.number, step=saved)
    logs = folder.attempt_folder(job.run_dir, begun.number).absolute()
    os.environ[failures.FOLDER] = str(logs)  # srun passes it on to the ranks
    say(
        f"attempt {begun.number}, job {job.number}, from step {saved}; "
        f"the ranks write {logs}/train-RANK.log"
    )
    nodes = examine(job.layout, job.cluster, cancelled=lambda: received.newest in PERSONS)
    for node, fault in nodes.bad.items():
        say(f"node {node} is bad: {fault}")
    if received.newest in PERSONS:
        return _settle(job, begun, Ending(0, received.newest))
    if nodes.needed and not received.newest:
        outcome = _without(job, nodes.needed, nodes.shared)
        return _record(job, begun, Ending(BAD_NODE), outcome)
    ranks = job.config.parallel.world_size
    supervisor = StepSupervisor(job.run_dir, begun, ranks, job.cluster.job, received)
    return _settle(job, begun, _run(job, logs, supervisor, nodes.engines))


def _run(
    job: BatchJob, logs: Path, supervisor: StepSupervisor, engine_nodes: Sequence[str] | None
) -> Ending:
    """Run the training step, and the engines' beside it where they have nodes of their own.

    Args:
        engine_nodes: None: all that the job has for engines.
    """
    layout, cluster = job.layout, job.cluster
    places = {"folder": str(logs), "workdir": os.getcwd()}
    rank = ["qurl", "slurm", "task", str(job.run_dir)]
    if engine_nodes is not None:
        rank += ["--engines", str(layout.engines * len(engine_nodes))]
    forget(job.run_dir)  # left by a supervisor that was killed with its ranks
    with contextlib.ExitStack() as stack:
        stack.callback(forget, job.run_dir)
        if layout.rollout:
            prepare(Path(job.config.rollout.rendezvous))
            offer = ["qurl", "slurm", "offer", str(job.run_dir)]
            step = rollout_step(layout, cluster, offer, **places, nodes=engine_nodes)
            stack.enter_context(beside(step))
        return supervisor.watch(training_step(layout, cluster, rank, **places))


def _without(job: BatchJob, nodes: tuple[str, ...], shared: str) -> Outcome:
    """Decide how a run goes on whose attempt cannot go on with these nodes."""
    if shared:
        return Outcome(Decision.STOP, BAD_NODE, shared)
    names = ", ".join(nodes)
    try:
        refuse_exclusion(job.run_dir, job.number, nodes)
    except ConfigError as error:
        reason = (
            f"{names} cannot be excluded ({error}); once the nodes are fixed, "
            "`qurl slurm submit`, as before, goes on"
        )
        return Outcome(Decision.STOP, BAD_NODE, reason)
    return Outcome(Decision.WITHOUT, 0, f"goes on without {names}", nodes)


def _settle_lost_attempt(job: BatchJob) -> Outcome | None:
    """Make the decision on an attempt of this job whose supervisor could not, as its node was lost
    or Slurm took the nodes too soon. None: there is no such attempt."""
    attempts = folder.attempts(job.run_dir)
    # Where Slurm has not restarted it, a person has ended the job of that one, and submitted this.
    if not job.restarts or not attempts or attempts[-1].ended:
        return None
    failure = "its first node was lost, or taken before it had ended"
    return _settle(job, attempts[-1], Ending(LOST, failure=failure))


def _settle(job: BatchJob, begun: folder.Attempt, ending: Ending) -> Outcome:
    """Make the decision on an attempt, and leave its record."""
    # Slurm's SIGTERM looks like a person's.
    if ending.stop_reason in PERSONS and _ended_by_slurm(job):
        failure = "Slurm has ended the job, as where a node is lost"
        ending = Ending(ending.code or LOST, failure=failure)
    attempts = folder.attempts(job.run_dir)
    earlier = [attempt for attempt in attempts if attempt.ended and attempt.number < begun.number]
    steps, retries = job.config.train.steps, job.cluster.job.retries
    saved = _saved_step(job.run_dir)
    outcome = decide(ending, begun.step_before, saved, earlier, steps=steps, retries=retries)
    return _record(job, begun, ending, outcome)


def _record(job: BatchJob, begun: folder.Attempt, ending: Ending, outcome: Outcome) -> Outcome:
    ended = replace(
        begun,
        step_after=_saved_step(job.run_dir),
        signal=ending.stop_reason,
        code=ending.code,
        decision=outcome.decision.value,
        reason=outcome.reason,
        ended_at=now(),
    )
    folder.write_attempt(job.run_dir, ended)
    say(f"attempt {begun.number}: {outcome.reason}")
    return outcome


def _has_all_nodes(job: BatchJob) -> bool:
    """Return whether the job is whole: with --no-kill, Slurm takes away nodes that fail."""
    nodes = str(job.layout.whole.nodes)
    nodes_left = facts_of(job.number).get("NumNodes", nodes)  # no answer: as submitted
    if nodes_left.partition("-")[0] == nodes:
        return True
    say(f"job {job.number} has {nodes_left} of its {nodes} nodes left")
    return False


def _ended_by_slurm(job: BatchJob) -> bool:
    """Slurm ends this job, for a lost node or at the end of a preemption's grace time.

    Where it may, it has put the job back into the queue already.
    """
    return int(facts_of(job.number).get("Restarts", "0")) > job.restarts


def _follow(outcome: Outcome, job: BatchJob, received: str) -> None:
    """Have the run go on in another job, or see to it that it does not."""
    ended_by_slurm = received in PERSONS and _ended_by_slurm(job)
    goes_on = outcome.decision is Decision.AGAIN
    if outcome.decision in GOES_ON and (ended_by_slurm or received in ("", WALL_TIME)):
        goes_on = True
    if ended_by_slurm and not goes_on:
        commands.cancel(job.number)
    elif ended_by_slurm:
        say(f"job {job.number} is back in the queue")
        time.sleep(LINGER_S)
    elif goes_on:
        next_job = _queue_again(job)
        if outcome.excluded_nodes:  # a job that runs cannot be kept off a node, one that waits can
            commands.exclude(next_job, excluding(job.number, outcome.excluded_nodes))


def _queue_again(job: BatchJob) -> int:
    """Requeue the job, or submit it anew where the site forbids that; return the next one's id."""
    # Slurm tells a requeued job to end: neither this nor scontrol itself, before it is done.
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


def _own_job(env: Mapping[str, str]) -> tuple[int, int]:
    """Return this job's id, and how often Slurm has started it again."""
    if "SLURM_JOB_ID" not in env:
        raise ConfigError(
            "SLURM_JOB_ID is not set: `qurl slurm attempt` runs inside a job that "
            "`qurl slurm submit` submits"
        )
    return int(env["SLURM_JOB_ID"]), int(env.get("SLURM_RESTART_COUNT", "0"))


def _saved_step(run_dir: Path) -> int:
    """Return the step of the newest checkpoint; 0 where there is none."""
    newest = latest(run_dir)
    return TrainState.read(newest).step if newest else 0
