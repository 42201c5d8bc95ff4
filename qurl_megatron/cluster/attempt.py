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
from qurl_megatron.cluster.examination import examine, exclude, own_parts, refuse_exclusion
from qurl_megatron.cluster.layout import Allocation, lay_out, rollout_step, training_step
from qurl_megatron.cluster.offer import address_for_others, own_name, prepare
from qurl_megatron.cluster.supervise import Ending, Received, StepSupervisor, beside, facts_of, say
from qurl_megatron.cluster.verdict import (
    BAD_NODE,
    GOES_ON,
    PERSONS,
    WALL_TIME,
    Decision,
    Outcome,
    decide,
    history,
)
from qurl_megatron.config import RunConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.muster import forget
from qurl_megatron.observe import failures
from qurl_megatron.observe.attempts import tried
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

    @property
    def requeues(self) -> bool:
        return self.cluster.job.again == "requeue"


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
        _cancel_chain(job)
        return lost.code
    late = False
    with Received() as received:
        while True:
            saved = _saved_step(run_dir)
            if saved >= job.config.train.steps > 0:
                say(f"{run_dir} has all its {saved} steps")
                _cancel_chain(job)
                return 0
            outcome = _once(job, saved, received, late=late)
            late = True
            retries_here = outcome.decision is Decision.RETRY and not received.newest
            if not (retries_here and _has_all_nodes(job)):
                break
        _follow(outcome, job, received.newest)
    return outcome.code


def _once(job: BatchJob, saved: int, received: Received, *, late: bool) -> Outcome:
    """Make one attempt, from its folder to its record.

    Args:
        saved: step of the checkpoint that it goes on from.
        late: it does not have the job's whole time.
    """
    components = job.layout.components(job.cluster)
    gpus = sum(component.nodes * component.gpus for component in components)
    number = folder.open_attempt(job.run_dir, gpus=gpus, step=saved)
    logs = folder.attempt_folder(job.run_dir, number).absolute()
    os.environ[failures.FOLDER] = str(logs)  # srun passes it on to the ranks
    say(
        f"attempt {number}, job {job.number}, from step {saved}; "
        f"the ranks write {logs}/train-RANK.log"
    )
    nodes = examine(job.layout, job.cluster, cancelled=lambda: received.newest in PERSONS)
    for node, fault in nodes.bad.items():
        say(f"node {node} is bad: {fault}")
    if received.newest in PERSONS:
        return _settle(job, number, saved, Ending(0, received.newest))
    if nodes.needed and not received.newest:
        outcome = _without(job, nodes.needed, nodes.shared)
        return _record(job, number, saved, saved, Ending(BAD_NODE), outcome)
    ranks = job.config.parallel.world_size
    supervisor = StepSupervisor(job.run_dir, logs, job.number, ranks, job.cluster.job, received)
    ending = _run(job, logs, supervisor, nodes.engines)
    return _settle(job, number, saved, ending, late=late)


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
            towards = address_for_others(own_name())
            offer = ["qurl", "slurm", "offer", str(job.run_dir), "--towards", towards]
            step = rollout_step(layout, cluster, offer, **places, nodes=engine_nodes)
            stack.enter_context(beside(step, supervisor.spare_s))
        return supervisor.watch(training_step(layout, cluster, rank, **places))


def _without(job: BatchJob, nodes: tuple[str, ...], shared: str) -> Outcome:
    """Decide how a run goes on whose attempt cannot go on with these nodes."""
    if shared:
        return Outcome(Decision.STOP, BAD_NODE, shared)
    names = ", ".join(nodes)
    try:
        refuse_exclusion(job.run_dir, job.number, nodes)
        if not job.requeues and not _others(job):
            raise ConfigError("no job of the chain is left")
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
    attempts = tried(job.run_dir)
    # Where Slurm has not restarted it, a person has ended the job of that one, and submitted this.
    if not job.restarts or not attempts or attempts[-1].ended:
        return None
    newest = attempts[-1]
    failure = "its first node was lost, or taken before it had ended"
    ending = Ending(LOST, failure=failure, at=newest.last_sign)
    return _settle(job, newest.number, newest.began.step_before, ending)


def _settle(
    job: BatchJob, number: int, saved: int, ending: Ending, *, late: bool = False
) -> Outcome:
    """Make the decision on an attempt, and leave its record."""
    if ending.stop_reason in PERSONS and _ended_by_slurm(
        job
    ):  # whose SIGTERM looks like a person's
        failure = "Slurm has ended the job, as where a node is lost"
        ending = replace(ending, code=ending.code or LOST, stop_reason="", failure=failure)
    after = _saved_step(job.run_dir)
    outcome = decide(
        ending.code,
        ending.stop_reason,
        saved,
        after,
        history(folder.attempts(job.run_dir)),
        steps=job.config.train.steps,
        retries=job.cluster.job.retries,
        failure=ending.failure,
        late=late,
    )
    return _record(job, number, saved, after, ending, outcome)


def _record(
    job: BatchJob, number: int, saved: int, after: int, ending: Ending, outcome: Outcome
) -> Outcome:
    record = folder.Attempt(
        number=number,
        job=job.number,
        restarts=job.restarts,
        step_before=saved,
        step_after=after,
        signal=ending.stop_reason,
        code=ending.code,
        decision=outcome.decision.value,
        ended_at=ending.at,
    )
    folder.close_attempt(job.run_dir, record)
    say(f"attempt {number}: {outcome.reason}")
    return outcome


def _has_all_nodes(job: BatchJob) -> bool:
    """With --no-kill, Slurm takes away nodes that fail; with a heterogeneous job, it ends that."""
    nodes = str(job.layout.components(job.cluster)[0].nodes)
    nodes_left = facts_of(job.number).get("NumNodes", nodes)  # no answer: as submitted
    if nodes_left.partition("-")[0] == nodes:
        return True
    say(f"job {job.number} has {nodes_left} of its {nodes} nodes left")
    return False


def _ended_by_slurm(job: BatchJob) -> bool:
    """Slurm ends this job, for a lost node or at the end of a preemption's grace time.

    Where it may, it has put the job back into the queue already.
    """
    facts = facts_of(job.number)
    put_back = int(facts.get("Restarts", "0")) > job.restarts
    return put_back or facts.get("Reason") == "NodeDown"


def _follow(outcome: Outcome, job: BatchJob, received: str) -> None:
    """Requeue the job, leave the rest to its chain, or cancel the chain."""
    ended_by_slurm = received in PERSONS and _ended_by_slurm(job)
    goes_on = outcome.decision is Decision.AGAIN
    if outcome.decision in GOES_ON and (ended_by_slurm or received in ("", WALL_TIME)):
        goes_on = True
    if not goes_on:
        _cancel_chain(job)
        if ended_by_slurm and job.requeues:  # Slurm has put it back
            commands.cancel([job.number])
    elif ended_by_slurm and job.requeues:
        say(f"job {job.number} is back in the queue")
        time.sleep(LINGER_S)
    elif job.requeues:
        _requeue(job)
    elif not _others(job):
        say("the chain ends here; `qurl slurm submit`, as before, goes on")
    if outcome.excluded_nodes:  # a job that runs cannot be kept off a node, one that waits can
        jobs = own_parts(os.environ) if job.requeues else _others(job)
        exclude(jobs, outcome.excluded_nodes)


def _requeue(job: BatchJob) -> None:
    say(f"job {job.number} goes back to the queue")
    # Slurm tells a requeued job to end: neither this nor scontrol itself, before it is done.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        commands.requeue(job.number)
    except ConfigError as error:
        raise ConfigError(
            f'{error}; `qurl slurm submit`, as before, goes on; job.again = "chain" in the '
            "cluster file is for sites that forbid requeueing"
        ) from None


def _cancel_chain(job: BatchJob) -> None:
    """Take the jobs of a chain out of the queue that nothing is left for."""
    try:
        commands.cancel(_others(job))
    except ConfigError as error:  # they find for themselves that nothing is left
        say(str(error))


def _others(job: BatchJob) -> list[int]:
    """Return the run's jobs that are in the queue beside this one."""
    others = [number for number in folder.jobs(job.run_dir) if number != job.number]
    return list(commands.queued(others))


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
