"""The nodes of an attempt are examined before its ranks start: asked, judged, and told apart.

Without a bad rollout node the run goes on with fewer engines. Without a bad training node there is
nothing to train on: the job has to go back to the queue, with that node excluded. Where all nodes
are bad, others would be bad alike: it is what they share, and a person has to look.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from qurl_megatron.errors import ConfigError
from qurl_megatron.observe.attempts import read_record
from qurl_megatron.observe.clock import now
from qurl_megatron.runtime.filesystem import wait_until_seen
from qurl_megatron.slurm import commands, folder
from qurl_megatron.slurm.bad_nodes import Report, judge
from qurl_megatron.slurm.cluster import ClusterConfig
from qurl_megatron.slurm.layout import Allocation
from qurl_megatron.slurm.measure import CANARY, from_json
from qurl_megatron.slurm.steps import EXAMINATION_SAYS, examining_steps

VERDICT = "verdict.json"
POLL_S = 0.1
GRACE_S = 10.0
MOST = 3
"""Attempts of a submitted run that may end for bad nodes: beyond, it is hardly the nodes."""


@dataclass(frozen=True)
class Found:
    """What an examination has shown."""

    bad: dict[str, str]  # a sentence by node
    engines: tuple[str, ...] | None = None  # rollout nodes that are left; None: all there are
    needed: tuple[str, ...] = ()  # bad nodes without which this attempt cannot go on
    shared: str = ""  # that all are bad, so that none of them is to be excluded; "": not all are


def examine(
    run_dir: Path,
    number: int,
    layout: Allocation,
    cluster: ClusterConfig,
    *,
    cancelled: Callable[[], bool] = lambda: False,
) -> Found:
    """Have every node of the job measure itself, and judge what they say.

    Leaves attempts/N/nodes/NODE.json and verdict.json; ends without them once it is cancelled.

    Raises:
        ConfigError: the run's folder cannot be written from here, or srun cannot be run.
    """
    if not cluster.job.examine_s:
        return Found({})
    training, rollout = nodes_of(layout, cluster, os.environ)
    nodes = folder.attempt_folder(run_dir, number) / "nodes"
    folder.put(nodes / CANARY, "the first node\n")
    command = ["qurl", "slurm", "examine", str(nodes)]
    steps = examining_steps(layout, cluster, command, workdir=os.getcwd())
    began = time.monotonic()
    heard = _ask(steps, cluster.job.examine_s, cancelled)
    if cancelled():
        return Found({})
    if not heard and time.monotonic() - began < cluster.job.examine_s:
        # All have ended without a word: it must be the examination's own fault.
        print(
            "qurl: the examination of the nodes failed, as said above; it is left out", flush=True
        )
        return Found({})
    reports = {node: _with_file(report, nodes) for node, report in heard.items()}
    wanted = dict.fromkeys(training, layout.training.gpus)
    if layout.rollout:
        wanted |= dict.fromkeys(rollout, layout.rollout.gpus)
    found = tell_apart(judge(reports, wanted), training, rollout)
    record = {"bad": found.bad, "needed": found.needed, "job": int(os.environ["SLURM_JOB_ID"])}
    folder.put(nodes / VERDICT, json.dumps(record, indent=1) + "\n")
    return found


def nodes_of(
    layout: Allocation, cluster: ClusterConfig, env: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Names of the training nodes, and of the rollout nodes."""
    if layout.rollout and cluster.job.layout == "hetjob":
        lists = (env[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"] for group in (0, 1))
        training, rollout = map(commands.hostnames, lists)
        return training, rollout
    whole = commands.hostnames(env["SLURM_JOB_NODELIST"])
    return whole[: layout.training.nodes], whole[layout.training.nodes :]


def tell_apart(bad: dict[str, str], training: Sequence[str], rollout: Sequence[str]) -> Found:
    """
    Args:
        training, rollout: names of the nodes of each.
    """
    nodes = [*training, *rollout]
    if len(nodes) > 1 and all(node in bad for node in nodes):
        return Found(bad, needed=tuple(bad), shared=_shared(bad, nodes[0]))
    left = tuple(node for node in rollout if node not in bad)
    if rollout and not left or any(node in bad for node in training):
        return Found(bad, needed=tuple(bad))
    return Found(bad, engines=left if len(left) < len(rollout) else None)


def _shared(bad: dict[str, str], node: str) -> str:
    return (
        f"all {len(bad)} nodes are bad, so none is excluded: look at what they share, such as "
        f"container and site.prolog in the cluster file; what is wrong with {node}: {bad[node]}; "
        "once it is fixed, `qurl slurm submit`, as before, goes on"
    )


def refuse_exclusion(run_dir: Path, job: int, names: Sequence[str]) -> None:
    """Ask whether the run can go on without these nodes.

    Raises:
        ConfigError: it cannot, for Slurm has too few others, or it has been tried often enough; or
            a verdict is damaged.
    """
    before = _exclusions(run_dir)
    if before >= MOST:
        raise ConfigError(
            f"nodes of this run were excluded {before} times already; look at "
            f"{run_dir}/slurm/attempts/*/nodes"
        )
    script = (run_dir / "slurm/job.sbatch").read_text(encoding="utf-8")
    option = f"#SBATCH --exclude={','.join(_all_excluded(job, names))}\n"
    commands.test_only(script.replace("#SBATCH --nodes=", f"{option}#SBATCH --nodes="))


def exclude(jobs: Sequence[int], names: Sequence[str]) -> None:
    """Keep waiting jobs off nodes; to those that were excluded before, these are added.

    Raises:
        ConfigError: Slurm refuses.
    """
    # A requeued job is told to end: not the program that is to change it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for job in jobs:
        commands.exclude(job, _all_excluded(job, names))


def own_parts(env: Mapping[str, str]) -> list[int]:
    """Ids of this job's components; a job of one kind has one."""
    count = int(env.get("SLURM_HET_SIZE", "1"))
    if count == 1:
        return [int(env["SLURM_JOB_ID"])]
    return [int(env[f"SLURM_JOB_ID_HET_GROUP_{group}"]) for group in range(count)]


def _all_excluded(job: int, names: Sequence[str]) -> list[str]:
    before = commands.job_facts(job).get("ExcNodeList", "(null)")
    known = [] if before == "(null)" else commands.hostnames(before)
    return sorted({*known, *names})


def _exclusions(run_dir: Path) -> int:
    """Attempts of what was submitted last that ended for bad nodes, before this one."""
    submitted = folder.submitted(run_dir)
    jobs = submitted.jobs if submitted else []
    found = sorted((run_dir / "slurm/attempts").glob(f"*/nodes/{VERDICT}"))
    ended = [read_record(path, lambda one: one["job"] in jobs and one["needed"]) for path in found]
    return max(0, sum(map(bool, ended)) - 1)


def _ask(
    steps: list[list[str]], seconds: float, cancelled: Callable[[], bool]
) -> dict[str, Report]:
    """Run the steps; what nodes say until they end, for so long, or until it is cancelled."""
    heard: dict[str, Report] = {}
    running = [_start(step) for step in steps]
    listeners = [threading.Thread(target=_listen, args=(one.stdout, heard)) for one in running]
    listeners += [threading.Thread(target=_pass_on, args=(one.stderr,)) for one in running]
    for listener in listeners:
        listener.start()
    end = time.monotonic() + seconds
    while (left := [one for one in running if one.poll() is None]) and not cancelled():
        if time.monotonic() > end:
            break
        time.sleep(POLL_S)
    for process in left:
        process.terminate()  # srun ends its tasks itself then
    for process in running:
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
    for listener in listeners:
        listener.join()
    return dict(heard)


def _start(step: list[str]) -> subprocess.Popen:
    env = {"PYTHONWARNINGS": "ignore", **os.environ}
    try:
        return subprocess.Popen(
            step,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"{step[0]} cannot be run: {error}") from None


def _pass_on(said: IO[str]) -> None:
    for line in said:
        print(f"{EXAMINATION_SAYS}{line}", end="", file=sys.stderr, flush=True)


def _listen(said: IO[str], heard: dict[str, Report]) -> None:
    for line in said:
        try:
            report = from_json(line)
        except (ValueError, TypeError):  # a prolog or a container may have a word as well
            print(line, end="", flush=True)
            continue
        heard[report.node] = replace(report, heard_at=now())


def _with_file(report: Report, nodes: Path) -> Report:
    """Whether what the node wrote is seen here."""
    if report.folder:
        return report
    try:
        wait_until_seen(nodes / f"{report.node}.json", "the node wrote it", key="train.run_dir")
    except ConfigError as error:
        return replace(report, folder=str(error))
    return report
