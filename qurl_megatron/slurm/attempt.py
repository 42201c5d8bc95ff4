"""``qurl slurm attempt``: what the job script becomes, from the first step of ``srun`` to the last.

It starts the ranks, has them watched over, and decides what follows: the run is done, it is tried
again here, it goes on in another job, or it stops for a person to look. It needs no GPU, and
neither torch nor Megatron.
"""

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from qurl_megatron.config import RunConfig
from qurl_megatron.errors import ConfigError
from qurl_megatron.slurm import commands, folder
from qurl_megatron.slurm.cluster import ClusterConfig
from qurl_megatron.slurm.layout import Allocation, lay_out
from qurl_megatron.slurm.offer import prepare
from qurl_megatron.slurm.steps import rollout_step, training_step
from qurl_megatron.slurm.supervise import Ending, Received, Supervisor, beside, facts_of, say
from qurl_megatron.slurm.task import ATTEMPT
from qurl_megatron.slurm.verdict import WALL_TIME, Decision, Outcome, before, decide
from qurl_megatron.training.state import TrainState, latest


def attempt(run_dir: Path) -> int:
    """Run the training step of this job, again after a failure, and see to what follows.

    Returns:
        0 where the run is done, or goes on in another job; 143 after a clean stop that was asked
        for; 4 where another attempt would bring it no further; else the exit code of the training
        step.

    Raises:
        ConfigError: this is no job, or not one that ``qurl slurm submit`` has submitted.
    """
    job = _own_job(os.environ)
    config, cluster = folder.recipe(run_dir), folder.cluster(run_dir)
    layout = lay_out(config.parallel, config.rollout, cluster.node)
    with Received() as received:
        while True:
            if (saved := _saved(run_dir)) >= config.train.steps > 0:
                say(f"{run_dir} has all its {saved} steps")
                _cancel_chain(run_dir, job)
                return 0
            outcome = _once(run_dir, job, saved, config, cluster, received)
            here = outcome.decision is Decision.RETRY and not received.first
            if not (here and _whole(job, layout, cluster)):
                break
        _follow(outcome, run_dir, job, cluster, received.first)
    return outcome.code


def _once(
    run_dir: Path,
    job: int,
    saved: int,
    config: RunConfig,
    cluster: ClusterConfig,
    received: Received,
) -> Outcome:
    """One attempt, from its folder to its record."""
    earlier = before(folder.attempts(run_dir))
    number = folder.open_attempt(run_dir)
    logs = folder.attempt_folder(run_dir, number).absolute()
    os.environ[ATTEMPT] = str(logs)  # srun passes it on
    say(f"attempt {number}, job {job}, from step {saved}; the ranks write {logs}/train-RANK.log")
    ranks = config.parallel.world_size
    supervisor = Supervisor(run_dir, logs, job, ranks, cluster.job, received)
    ended = _run(run_dir, logs, config, cluster, supervisor)
    after = _saved(run_dir)
    outcome = decide(
        ended.code,
        ended.told,
        saved,
        after,
        earlier,
        steps=config.train.steps,
        retries=cluster.job.retries,
        failed=ended.failed,
    )
    record = folder.Attempt(
        number=number,
        job=job,
        restarts=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        step_before=saved,
        step_after=after,
        signal=ended.told,
        code=ended.code,
        decision=outcome.decision.value,
    )
    folder.close_attempt(run_dir, record)
    say(f"attempt {number}: {outcome.why}")
    return outcome


def _run(
    run_dir: Path, logs: Path, config: RunConfig, cluster: ClusterConfig, supervisor: Supervisor
) -> Ending:
    """The training step, and the engines' beside it where they have nodes of their own."""
    layout = lay_out(config.parallel, config.rollout, cluster.node)
    where = {"folder": str(logs), "workdir": os.getcwd()}
    rank = ["qurl", "slurm", "task", str(run_dir)]
    with contextlib.ExitStack() as stack:
        if layout.rollout:
            prepare(Path(config.rollout.rendezvous))
            here = os.environ.get("SLURMD_NODENAME", socket.gethostname())
            node = ["qurl", "slurm", "offer", str(run_dir), "--towards", here]
            stack.enter_context(beside(rollout_step(layout, cluster, node, **where)))
        return supervisor.watch(training_step(layout, cluster, rank, **where))


def _whole(job: int, layout: Allocation, cluster: ClusterConfig) -> bool:
    """The job has all its nodes: with --no-kill, Slurm takes away those that fail. Of a
    heterogeneous job none can: Slurm ends it."""
    parts = layout.training if cluster.job.layout == "hetjob" else layout.whole
    nodes = facts_of(job).get("NumNodes", str(parts.nodes))  # no answer: as submitted
    if nodes.partition("-")[0] == str(parts.nodes):
        return True
    say(f"job {job} has {nodes} of its {parts.nodes} nodes left")
    return False


def _follow(
    outcome: Outcome, run_dir: Path, job: int, cluster: ClusterConfig, received: str
) -> None:
    wanted = outcome.decision is Decision.AGAIN or (
        outcome.decision is Decision.RETRY and received in ("", WALL_TIME)
    )
    if not wanted:
        _cancel_chain(run_dir, job)
    elif cluster.job.again == "requeue":
        say(f"job {job} goes back to the queue")
        try:
            commands.requeue(job)  # Slurm may end this process before it returns
        except ConfigError as error:
            raise ConfigError(
                f'{error}; `qurl slurm submit`, as before, goes on; job.again = "chain" in the '
                "cluster file is for sites that forbid requeueing"
            ) from None
    elif not _others(run_dir, job):
        say("the chain ends here; `qurl slurm submit`, as before, goes on")


def _cancel_chain(run_dir: Path, job: int) -> None:
    """The jobs of a chain that nothing is left for."""
    commands.cancel(_others(run_dir, job))


def _others(run_dir: Path, job: int) -> list[int]:
    """The run's jobs that are in the queue beside this one."""
    found = folder.submitted(run_dir)
    return [one for one in commands.queued(found.jobs if found else []) if one != job]


def _own_job(env: Mapping[str, str]) -> int:
    if "SLURM_JOB_ID" not in env:
        raise ConfigError(
            "SLURM_JOB_ID is not set: `qurl slurm attempt` runs inside a job that "
            "`qurl slurm submit` submits"
        )
    return int(env["SLURM_JOB_ID"])


def _saved(run_dir: Path) -> int:
    """Step of the newest checkpoint; 0 where there is none."""
    newest = latest(run_dir)
    return TrainState.read(newest).step if newest else 0
