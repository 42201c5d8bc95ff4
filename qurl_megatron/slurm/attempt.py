"""``qurl slurm attempt``: what the job script becomes, from the first step of ``srun`` to the last.

It starts the ranks, passes on what Slurm signals, and decides what follows: the run is done, it
goes on in another job, or it stops for a person to look. It needs no GPU, and neither torch nor
Megatron.

Whatever signal Slurm sends, the ranks get SIGUSR1 through ``srun`` (``task`` says why): they finish
or drop their step, save, and end.
"""

import contextlib
import enum
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qurl_megatron.config import RunConfig
from qurl_megatron.errors import ConfigError
from qurl_megatron.slurm import commands, folder
from qurl_megatron.slurm.addresses import reachable
from qurl_megatron.slurm.cluster import ClusterConfig
from qurl_megatron.slurm.examination import examine, exclude, own_parts, refuse_exclusion
from qurl_megatron.slurm.layout import lay_out
from qurl_megatron.slurm.offer import prepare
from qurl_megatron.slurm.steps import rollout_step, training_step
from qurl_megatron.slurm.task import STOPPED
from qurl_megatron.training.state import TrainState, latest

POLL_S = 0.5
ENGINES_S = 30.0
"""That engines on nodes of their own may take to leave."""
WALL_TIME = "USR1"
"""What Slurm sends before the time limit; SIGTERM comes when somebody takes the nodes away."""

FINAL = (2, 3)
"""Exit codes of a run that would only end so again: a mistake in the input; the guard."""
NO_PROGRESS = 4
"""Exit code of an attempt whose time was up before it had saved a new step."""
BAD_NODE = 7
"""Exit code of an attempt that needs a node which is bad, where there is no other."""


class Decision(enum.StrEnum):
    DONE = "done"
    AGAIN = "again"  # in another job
    STOP = "stop"


@dataclass(frozen=True)
class Outcome:
    """What follows on an attempt."""

    decision: Decision
    code: int  # of the supervisor, and so of the job
    why: str


def decide(code: int, received: str, before: int, after: int, *, steps: int) -> Outcome:
    """
    Args:
        code: exit code of the training step; 0 after a clean stop, too.
        received: the signal that the supervisor got first, such as USR1; "" for none.
        before: step of the newest checkpoint when the attempt began.
        after: the same at its end.
        steps: all that the recipe asks for.
    """
    saved = f"step {after} is saved"
    if code == 0 and after >= steps:
        return Outcome(Decision.DONE, 0, f"all {steps} steps are done")
    if received == WALL_TIME and code not in FINAL:
        if after > before:
            return Outcome(Decision.AGAIN, 0, f"time is up; {saved}")
        return Outcome(
            Decision.STOP,
            NO_PROGRESS,
            f"time was up before a step after {before} was saved, and another attempt would end "
            "likewise; raise job.time_limit or job.signal_s in the cluster file",
        )
    if code == 0:
        by = f"SIG{received}" if received else "a signal to the ranks"
        return Outcome(Decision.STOP, STOPPED, f"stopped by {by}; {saved}")
    return Outcome(Decision.STOP, code, f"the training step ended with {code}; {saved}")


def attempt(run_dir: Path) -> int:
    """Run the training step of this job, and see to what follows.

    Returns:
        0 where the run is done, or goes on in another job; 143 after a clean stop that was asked
        for; 4 where time was up before anything was saved; else the exit code of the training step.

    Raises:
        ConfigError: this is no job, or not one that ``qurl slurm submit`` has submitted.
    """
    job = _own_job(os.environ)
    config, cluster = folder.recipe(run_dir), folder.cluster(run_dir)
    before = _saved(run_dir)
    if before >= config.train.steps > 0:
        _say(f"{run_dir} has all its {before} steps")
        _cancel_chain(run_dir, job)
        return 0
    number = folder.open_attempt(run_dir)
    logs = folder.attempt_folder(run_dir, number)
    _say(f"attempt {number}, job {job}, from step {before}; the ranks write {logs}/train-RANK.log")
    with Received() as received:
        layout = lay_out(config.parallel, config.rollout, cluster.node)
        found = examine(run_dir, number, layout, cluster)
        for node, why in found.bad.items():
            _say(f"node {node} is bad: {why}")
        if found.needed and not received.first:
            code, after = BAD_NODE, before
            outcome = _without(found.needed, run_dir, job, cluster)
        else:
            code = _run(run_dir, logs, config, cluster, received, found.engines)
            after = _saved(run_dir)
            outcome = decide(code, received.first, before, after, steps=config.train.steps)
        ended = folder.Attempt(
            number=number,
            job=job,
            restarts=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            step_before=before,
            step_after=after,
            signal=received.first,
            code=code,
            decision=outcome.decision.value,
        )
        folder.close_attempt(run_dir, ended)
        _say(f"attempt {number}: {outcome.why}")
        _follow(outcome, run_dir, job, cluster)
        if code == BAD_NODE and outcome.decision is Decision.AGAIN:
            requeued = cluster.job.again == "requeue"
            exclude(own_parts(os.environ) if requeued else _others(run_dir, job), found.needed)
    return outcome.code


def _without(nodes: Sequence[str], run_dir: Path, job: int, cluster: ClusterConfig) -> Outcome:
    """What follows where this attempt cannot go on with these nodes."""
    names = ", ".join(nodes)
    try:
        refuse_exclusion(run_dir, job, nodes)
        if cluster.job.again == "chain" and not _others(run_dir, job):
            raise ConfigError("no job of the chain is left")
    except ConfigError as error:
        return Outcome(
            Decision.STOP,
            BAD_NODE,
            f"{names} cannot be excluded ({error}); once the nodes are mended, "
            "`qurl slurm submit`, as before, goes on",
        )
    return Outcome(Decision.AGAIN, 0, f"goes on without {names}")


def _run(
    run_dir: Path,
    logs: Path,
    config: RunConfig,
    cluster: ClusterConfig,
    received: "Received",
    engines: Sequence[str] | None = None,
) -> int:
    """The training step, and the engines' beside it where they have nodes of their own.

    Args:
        engines: the nodes that have some; None: all that the job has for them.

    Returns:
        Exit code of the former.
    """
    layout = lay_out(config.parallel, config.rollout, cluster.node)
    where = {"folder": str(logs), "workdir": os.getcwd()}
    rank = ["qurl", "slurm", "task", str(run_dir)]
    if engines is not None:
        rank += ["--engines", str(layout.engines * len(engines))]
    with contextlib.ExitStack() as beside:
        if layout.rollout:
            prepare(Path(config.rollout.rendezvous))
            here = reachable(os.environ.get("SLURMD_NODENAME", socket.gethostname()))
            node = ["qurl", "slurm", "offer", str(run_dir), "--towards", here]
            step = rollout_step(layout, cluster, node, **where, nodes=engines)
            beside.enter_context(_beside(step))
        return _supervise(training_step(layout, cluster, rank, **where), received)


class Received:
    """Inside, notes the signals that Slurm sends in place of ending this process."""

    def __init__(self) -> None:
        self.first = ""

    def __enter__(self) -> "Received":
        numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame) -> None:
        self.first = self.first or signal.Signals(number).name.removeprefix("SIG")


def _supervise(step: list[str], received: Received) -> int:
    """Run the step to its end; the first signal goes to its ranks.

    Returns:
        Its exit code, 128 + n where ``srun`` itself was ended by signal n.
    """
    process = _start(step)
    passed_on = False
    while True:
        try:
            code = process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if received.first and not passed_on:
                _say(f"SIG{received.first}: the ranks save and end")
                process.send_signal(signal.SIGUSR1)
                passed_on = True
            continue
        return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _beside(step: list[str]) -> Iterator[None]:
    """Run the engines' step while the ranks run. Its end is no reason to end: engines may go."""
    process = _start(step)
    try:
        yield
    finally:
        process.send_signal(signal.SIGUSR1)
        try:
            process.wait(ENGINES_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # srun ends its tasks itself then
            process.wait()


def _start(step: list[str]) -> subprocess.Popen:
    # Megatron warns of every optional package it does not find; `qurl show --env` says it once.
    env = {"PYTHONWARNINGS": "ignore", **os.environ}
    try:
        # A session of its own: what is sent to the supervisor's group must not reach srun.
        return subprocess.Popen(step, env=env, start_new_session=True)
    except OSError as error:
        raise ConfigError(f"{step[0]} cannot be run: {error}") from None


def _follow(outcome: Outcome, run_dir: Path, job: int, cluster: ClusterConfig) -> None:
    if outcome.decision is not Decision.AGAIN:
        _cancel_chain(run_dir, job)
    elif cluster.job.again == "requeue":
        _say(f"job {job} goes back to the queue")
        try:
            commands.requeue(job)  # Slurm may end this process before it returns
        except ConfigError as error:
            raise ConfigError(
                f'{error}; `qurl slurm submit`, as before, goes on; job.again = "chain" in the '
                "cluster file is for sites that forbid requeueing"
            ) from None
    elif not _others(run_dir, job):
        _say("the chain ends here; `qurl slurm submit`, as before, goes on")


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


def _say(line: str) -> None:
    print(f"qurl: {line}", flush=True)
