"""The nodes of an attempt are examined before its ranks start: asked, judged, and told apart.

A node is compared with the others of its own job, which have the same GPUs and software: how long
a product should take need not be known. Without a bad rollout node the run goes on with fewer
engines. Without a bad training node there is nothing to train on: the job has to go back to the
queue, with that node excluded. Where all nodes are bad, others would be bad alike: it is what they
share, and a person has to look.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from qurl_megatron.cluster import commands, folder
from qurl_megatron.cluster.cluster import ClusterConfig
from qurl_megatron.cluster.layout import EXAMINATION_PREFIX, Allocation, examining_steps
from qurl_megatron.cluster.measure import Report
from qurl_megatron.cluster.supervise import SrunStep, say
from qurl_megatron.cluster.verdict import Decision
from qurl_megatron.kit.errors import ConfigError

POLL_S = 0.1
GRACE_S = 10.0
MOST = 3
"""Attempts of a submitted run that may end for bad nodes: beyond, it is hardly the nodes."""

PRODUCT_SLOWER = 1.25
"""Times the job's median product. Sound GPUs of a kind differ by a few per cent, by power and heat;
one that is held back is a third slower or worse, and every other rank waits for it."""
REDUCE_SLOWER = 1.5
"""Times the job's median all-reduce: a link with fewer lanes doubles the time."""


@dataclass(frozen=True)
class Examination:
    """Which nodes are bad, and which of them the attempt can do without."""

    bad: dict[str, str]  # a sentence by node
    engines: tuple[str, ...] | None = None  # rollout nodes that are left; None: all there are
    needed: tuple[str, ...] = ()  # bad nodes without which this attempt cannot go on
    shared: str = ""  # that all are bad, so that none of them is to be excluded; "": not all are


def examine(
    layout: Allocation,
    cluster: ClusterConfig,
    *,
    cancelled: Callable[[], bool] = lambda: False,
) -> Examination:
    """Have every node of the job measure itself, and judge their reports.

    Raises:
        ConfigError: srun cannot be run.
    """
    if not cluster.job.examine_s:
        return Examination({})
    training, rollout = nodes_of(layout, cluster, os.environ)
    command = ["qurl", "slurm", "examine"]
    began = time.monotonic()
    steps = [
        SrunStep(step, EXAMINATION_PREFIX, capture=True)
        for step in examining_steps(layout, cluster, command, workdir=os.getcwd())
    ]
    running = steps
    while running and not cancelled() and time.monotonic() - began < cluster.job.examine_s:
        running = [step for step in running if step.wait(POLL_S) is None]
    in_time = time.monotonic() - began < cluster.job.examine_s
    reports: dict[str, Report] = {}
    for step in steps:
        if step in running:
            step.end_within(GRACE_S)
        reports |= read_reports(step.output)
    if cancelled():
        return Examination({})
    if not reports and in_time:
        # All have ended without a word: it must be the examination's own fault.
        say("the examination of the nodes failed, as said above; it is left out")
        return Examination({})
    gpus_by_node = dict.fromkeys(training, layout.training.gpus)
    if layout.rollout:
        gpus_by_node |= dict.fromkeys(rollout, layout.rollout.gpus)
    return tell_apart(judge(reports, gpus_by_node), training, rollout)


def read_reports(lines: Sequence[str]) -> dict[str, Report]:
    """Return the reports among the lines, by node; print the others."""
    reports = {}
    for line in lines:
        try:
            report = Report(**json.loads(line))
        except (ValueError, TypeError):  # a prolog or a container may have a word as well
            print(line.rstrip("\n"), flush=True)
        else:
            reports[report.node] = report
    return reports


def nodes_of(
    layout: Allocation, cluster: ClusterConfig, env: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return the names of the training nodes, and of the rollout nodes."""
    if len(layout.components(cluster)) == 2:
        training = commands.hostnames(env["SLURM_JOB_NODELIST_HET_GROUP_0"])
        return training, commands.hostnames(env["SLURM_JOB_NODELIST_HET_GROUP_1"])
    all_nodes = commands.hostnames(env["SLURM_JOB_NODELIST"])
    return all_nodes[: layout.training.nodes], all_nodes[layout.training.nodes :]


def judge(reports: Mapping[str, Report], gpus_by_node: Mapping[str, int]) -> dict[str, str]:
    """Return a sentence for each bad node.

    Args:
        reports: by node; nodes that did not answer are missing.
        gpus_by_node: GPUs that the job has on each of its nodes.
    """
    peers = list(reports.values())
    bad = {}
    for node, gpus in gpus_by_node.items():
        if node not in reports:
            bad[node] = "it did not answer within job.examine_s"
        elif faults := [*reports[node].faults, *_beside(reports[node], peers, gpus)]:
            bad[node] = "; ".join(faults)
    return bad


def _beside(own: Report, peers: Sequence[Report], gpus: int) -> Iterator[str]:
    """Yield what is wrong with a node beside the others of the job, itself included.

    GPUs are asked for only where some node has any: clusters without GPUs are for trying this out.
    """
    if own.faults and not own.devices:
        return  # it could not be measured
    some_have_gpus = any(peer.gpus or peer.devices for peer in peers)
    if some_have_gpus and min(own.gpus, own.devices) < gpus:
        yield (
            f"{gpus} GPUs were granted, the driver shows {own.gpus} and torch can use {own.devices}"
        )
    usual_ms = median_low([ms for peer in peers for ms in peer.product_ms] or [0.0])
    for index, ms in enumerate(own.product_ms):
        if ms > usual_ms * PRODUCT_SLOWER:
            yield (
                f"a matrix product on GPU {index} takes {ms:.3g} ms, "
                f"{usual_ms:.3g} on the job's others"
            )
    if own.reduce_ms is None:
        return
    if own.reduce_ms == float("inf"):
        yield "an all-reduce among its own devices fails, or does not end"
        return
    alike = [peer.reduce_ms for peer in peers if peer.devices == own.devices]
    usual_ms = median_low(ms for ms in alike if ms is not None)
    if own.reduce_ms > usual_ms * REDUCE_SLOWER:
        yield (
            f"an all-reduce among its own devices takes {own.reduce_ms:.3g} ms, "
            f"{usual_ms:.3g} on the job's others"
        )


def tell_apart(bad: dict[str, str], training: Sequence[str], rollout: Sequence[str]) -> Examination:
    """Tell the bad nodes that an attempt needs from those that it can do without.

    Args:
        training, rollout: names of the nodes of each.
    """
    nodes = [*training, *rollout]
    if len(nodes) > 1 and len(bad) == len(nodes):
        shared = (
            f"all {len(bad)} nodes are bad, so none is excluded: look at what they share, such as "
            f"container and site.prolog in the cluster file; what is wrong with {nodes[0]}: "
            f"{bad[nodes[0]]}; once it is fixed, `qurl slurm submit`, as before, goes on"
        )
        return Examination(bad, needed=tuple(bad), shared=shared)
    sound = tuple(node for node in rollout if node not in bad)
    if bad.keys() & set(training) or (rollout and not sound):
        return Examination(bad, needed=tuple(bad))
    return Examination(bad, engines=sound if len(sound) < len(rollout) else None)


# ---- exclusion


def refuse_exclusion(run_dir: Path, job: int, names: Sequence[str]) -> None:
    """Ask whether the run can go on without these nodes.

    Raises:
        ConfigError: it cannot, for Slurm has too few others, or it has been tried often enough; or
            an attempt's record is damaged.
    """
    submitted = folder.submitted(run_dir)
    jobs = submitted.jobs if submitted else []
    before = 0
    for attempt in folder.attempts(run_dir):
        before += attempt.decision == Decision.WITHOUT and attempt.job in jobs
    if before >= MOST:
        raise ConfigError(
            f"nodes of this run were excluded {before} times already; {run_dir}/slurm/job.log says "
            "which, and why"
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
    """Return the ids of this job's components; a job of one kind has one."""
    count = int(env.get("SLURM_HET_SIZE", "1"))
    if count == 1:
        return [int(env["SLURM_JOB_ID"])]
    return [int(env[f"SLURM_JOB_ID_HET_GROUP_{group}"]) for group in range(count)]


def _all_excluded(job: int, names: Sequence[str]) -> list[str]:
    before = commands.job_facts(job).get("ExcNodeList", "(null)")
    excluded = [] if before == "(null)" else commands.hostnames(before)
    return sorted({*excluded, *names})
