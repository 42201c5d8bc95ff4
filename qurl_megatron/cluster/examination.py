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
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from qurl_megatron.cluster import commands, folder
from qurl_megatron.cluster.cluster import ClusterConfig
from qurl_megatron.cluster.layout import Allocation
from qurl_megatron.cluster.measure import Report
from qurl_megatron.cluster.steps import EXAMINATION_SAYS, examining_steps
from qurl_megatron.cluster.verdict import Decision
from qurl_megatron.kit.errors import ConfigError

POLL_S = 0.1
GRACE_S = 10.0
MOST = 3
"""Attempts of a submitted run that may end for bad nodes: beyond, it is hardly the nodes."""

GPU_SLOWER = 1.25
"""Times the job's median product. Sound GPUs of a kind differ by a few per cent, by power and heat;
one that is held back is a third slower or worse, and every other rank waits for it."""
REDUCE_SLOWER = 1.5
"""Times the job's median all-reduce: a link with fewer lanes doubles the time."""
CPU_SLOWER = 20.0
"""Both without GPUs: a millisecond on a CPU that others use may well take ten."""


@dataclass(frozen=True)
class Examination:
    """What an examination has shown."""

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
    """Have every node of the job measure itself, and judge what they say.

    Raises:
        ConfigError: srun cannot be run.
    """
    if not cluster.job.examine_s:
        return Examination({})
    training, rollout = nodes_of(layout, cluster, os.environ)
    command = ["qurl", "slurm", "examine"]
    steps = examining_steps(layout, cluster, command, workdir=os.getcwd())
    began = time.monotonic()
    reports = _ask(steps, cluster.job.examine_s, cancelled)
    if cancelled():
        return Examination({})
    if not reports and time.monotonic() - began < cluster.job.examine_s:
        # All have ended without a word: it must be the examination's own fault.
        print(
            "qurl: the examination of the nodes failed, as said above; it is left out", flush=True
        )
        return Examination({})
    gpus_by_node = dict.fromkeys(training, layout.training.gpus)
    if layout.rollout:
        gpus_by_node |= dict.fromkeys(rollout, layout.rollout.gpus)
    return tell_apart(judge(reports, gpus_by_node), training, rollout)


def nodes_of(
    layout: Allocation, cluster: ClusterConfig, env: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Names of the training nodes, and of the rollout nodes."""
    if layout.rollout and cluster.job.layout == "hetjob":
        lists = (env[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"] for group in (0, 1))
        training, rollout = map(commands.hostnames, lists)
        return training, rollout
    all_nodes = commands.hostnames(env["SLURM_JOB_NODELIST"])
    return all_nodes[: layout.training.nodes], all_nodes[layout.training.nodes :]


def judge(reports: Mapping[str, Report], wanted: Mapping[str, int]) -> dict[str, str]:
    """Return a sentence for each bad node.

    Args:
        reports: by node; nodes that did not answer are missing.
        wanted: GPUs that the job has on each of its nodes.
    """
    peers = list(reports.values())
    bad = {}
    for node, count in wanted.items():
        if node not in reports:
            bad[node] = "it did not answer within job.examine_s"
        elif faults := [*reports[node].faults, *_beside(reports[node], peers, count)]:
            bad[node] = "; ".join(faults)
    return bad


def _beside(own: Report, peers: Sequence[Report], count: int) -> Iterator[str]:
    """Yield what is wrong with a node beside the others of the job, itself included.

    Only like is compared: GPUs with GPUs, an all-reduce with those of as many devices.
    """
    if own.product_ms is None:
        return
    if min(own.gpus, own.devices) < count and any(peer.gpus or peer.devices for peer in peers):
        yield (
            f"{count} GPUs were granted, the driver shows {own.gpus} and torch can use "
            f"{own.devices}"
        )
    if not own.devices and any(peer.devices for peer in peers):
        return  # its times are a CPU's
    alike = [peer for peer in peers if bool(peer.devices) == bool(own.devices)]
    usual = median_low(ms for peer in alike for ms in peer.product_ms or [])
    for index, ms in enumerate(own.product_ms):
        if ms > usual * (GPU_SLOWER if own.devices else CPU_SLOWER):
            device = f"GPU {index}" if own.devices else "its CPU"
            yield f"a matrix product on {device} takes {ms:.3g} ms, {usual:.3g} on the job's others"
    if own.reduce_ms is None:
        return
    if own.reduce_ms == float("inf"):
        yield "an all-reduce among its own devices fails, or does not end"
        return
    as_many = [peer.reduce_ms for peer in peers if peer.devices == own.devices]
    usual = median_low(ms for ms in as_many if ms is not None)
    if own.reduce_ms > usual * (REDUCE_SLOWER if own.devices else CPU_SLOWER):
        yield (
            f"an all-reduce among its own devices takes {own.reduce_ms:.3g} ms, "
            f"{usual:.3g} on the job's others"
        )


def tell_apart(bad: dict[str, str], training: Sequence[str], rollout: Sequence[str]) -> Examination:
    """
    Args:
        training, rollout: names of the nodes of each.
    """
    nodes = [*training, *rollout]
    if len(nodes) > 1 and all(node in bad for node in nodes):
        return Examination(bad, needed=tuple(bad), shared=_shared(bad, nodes[0]))
    sound_nodes = tuple(node for node in rollout if node not in bad)
    if rollout and not sound_nodes or any(node in bad for node in training):
        return Examination(bad, needed=tuple(bad))
    return Examination(bad, engines=sound_nodes if len(sound_nodes) < len(rollout) else None)


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
            an attempt's record is damaged.
    """
    before = _exclusions(run_dir)
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
    """Ids of this job's components; a job of one kind has one."""
    count = int(env.get("SLURM_HET_SIZE", "1"))
    if count == 1:
        return [int(env["SLURM_JOB_ID"])]
    return [int(env[f"SLURM_JOB_ID_HET_GROUP_{group}"]) for group in range(count)]


def _all_excluded(job: int, names: Sequence[str]) -> list[str]:
    before = commands.job_facts(job).get("ExcNodeList", "(null)")
    excluded = [] if before == "(null)" else commands.hostnames(before)
    return sorted({*excluded, *names})


def _exclusions(run_dir: Path) -> int:
    """Count the attempts of what was submitted last that ended for bad nodes."""
    submitted = folder.submitted(run_dir)
    jobs = submitted.jobs if submitted else []
    attempts = folder.attempts(run_dir)
    return sum(attempt.decision == Decision.WITHOUT and attempt.job in jobs for attempt in attempts)


def _ask(
    steps: list[list[str]], seconds: float, cancelled: Callable[[], bool]
) -> dict[str, Report]:
    """Run the steps to their end, for so long, or until it is cancelled; return nodes' reports."""
    running = [_start(step) for step in steps]
    reports: dict[str, Report] = {}
    with ThreadPoolExecutor(len(steps)) as pool:
        printed = [pool.submit(process.communicate) for process in running]
        end = time.monotonic() + seconds
        while any(process.poll() is None for process in running) and not cancelled():
            if time.monotonic() > end:
                break
            time.sleep(POLL_S)
        for process in running:
            process.terminate()  # srun ends its tasks itself then
        for process in running:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
    for output, errors in (words.result() for words in printed):
        for line in errors.splitlines():
            print(f"{EXAMINATION_SAYS}{line}", file=sys.stderr, flush=True)
        for line in output.splitlines():
            try:
                report = Report(**json.loads(line))
            except (ValueError, TypeError):  # a prolog or a container may have a word as well
                print(line, flush=True)
            else:
                reports[report.node] = report
    return reports


def _start(step: list[str]) -> subprocess.Popen:
    try:
        return subprocess.Popen(
            step,
            env={"PYTHONWARNINGS": "ignore", **os.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"{step[0]} cannot be run: {error}") from None
