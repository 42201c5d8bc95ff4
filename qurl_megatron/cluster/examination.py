"""The nodes of an attempt are examined before its ranks start.

Each node measures itself, by a task of ``srun``: its GPUs, their memory, and a matrix product on
each, compared with the node's other GPUs: how long it should take need not be known.

Without a bad rollout node the run goes on with fewer engines. Without a bad training node it cannot
go on: the job has to go back to the queue, with that node excluded. Where all nodes are bad, others
would be bad alike, and a person has to look.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low

from qurl_megatron.cluster import commands, folder
from qurl_megatron.cluster.cluster import ClusterConfig
from qurl_megatron.cluster.layout import EXAMINATION_PREFIX, Allocation, examining_step
from qurl_megatron.cluster.supervise import SrunStep, say
from qurl_megatron.cluster.tasks import own_name
from qurl_megatron.cluster.verdict import Decision
from qurl_megatron.kit.errors import ConfigError

GIB = 1 << 30
MOST_USED = 4 * GIB
"""Memory in use on a GPU before the job starts; CUDA takes less than 1 GiB for itself."""
REPEATS = 20
SLOWER = 1.25
"""Times the node's median product. Sound GPUs of a kind differ by a few per cent, by power and
heat; one that is held back is a third slower or worse, and every other rank waits for it."""
POLL_S = 0.1
GRACE_S = 10.0
MOST = 3
"""Attempts of a submitted run that may end for bad nodes: beyond, it is hardly the nodes."""


# ---- a node by itself


@dataclass(frozen=True)
class Report:
    """The findings of one node."""

    node: str
    faults: list[str]  # sentences that make it bad, whatever the others say
    gpus: int = 0  # that torch can use

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def measure_node() -> int:
    """Measure this node, and print its report. One that hangs in doing so gives none."""
    name = own_name()
    try:
        report = _measure(name)
    except Exception as error:  # a sick GPU may raise anything, and that is a finding
        first_line = str(error).partition("\n")[0]  # CUDA goes on about how to debug it
        report = Report(name, [f"it could not be measured: {type(error).__name__}: {first_line}"])
    print(report.as_json(), flush=True)
    return 0


def _measure(name: str) -> Report:
    import torch

    if not torch.cuda.is_available():
        return Report(name, [])
    faults, products_ms = [], []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        free, total = torch.cuda.mem_get_info(device)
        if total - free > MOST_USED:
            used = f"{(total - free) / GIB:.1f} GiB in use already"
            faults.append(f"GPU {index} has {used}: end what holds them, or reset it")
        products_ms.append(_product_ms(device))
    return Report(name, [*faults, *slow_gpus(products_ms)], len(products_ms))


def _product_ms(device) -> float:
    """Time the fastest of some products: others may use the device, and a GPU's first is slow."""
    import torch

    first, second = (torch.ones(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        torch.mm(first, second)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def slow_gpus(products_ms: Sequence[float]) -> Iterator[str]:
    """Yield a sentence for each GPU whose product takes much longer than the median."""
    usual_ms = median_low(products_ms or [0.0])
    for index, ms in enumerate(products_ms):
        if ms > SLOWER * usual_ms:
            yield (
                f"a matrix product on GPU {index} takes {ms:.3g} ms, {usual_ms:.3g} on the others"
            )


# ---- beside the others


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
    """Have every node of the job measure itself, and judge their reports."""
    if not cluster.job.examine_s:
        return Examination({})
    training, rollout = nodes_of(layout, os.environ)
    end = time.monotonic() + cluster.job.examine_s
    command = examining_step(layout, cluster, ["qurl", "slurm", "examine"], workdir=os.getcwd())
    step = SrunStep(command, EXAMINATION_PREFIX, capture=True)
    while (code := step.wait(POLL_S)) is None and not cancelled() and time.monotonic() < end:
        pass
    if code is None:
        step.end_within(GRACE_S)
    reports = read_reports(step.output)
    if cancelled():
        return Examination({})
    if not reports and code is not None:
        # All have ended without a word: it must be the examination's own fault.
        say("the examination of the nodes failed, as said above; it is left out")
        return Examination({})
    bad = judge(reports, [*training, *rollout], layout.whole.gpus)
    return tell_apart(bad, training, rollout)


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


def nodes_of(layout: Allocation, env: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the names of the training nodes, and of the rollout nodes."""
    nodes = commands.hostnames(env["SLURM_JOB_NODELIST"])
    return nodes[: layout.training.nodes], nodes[layout.training.nodes :]


def judge(reports: Mapping[str, Report], nodes: Sequence[str], gpus: int) -> dict[str, str]:
    """Return a sentence for each bad node.

    Args:
        reports: by node; nodes that did not answer are missing.
        gpus: that the job has on each of its nodes; asked for only where some node has any, for
            clusters without GPUs are for trying this out.
    """
    some_have_gpus = any(report.gpus for report in reports.values())
    bad = {}
    for node in nodes:
        report = reports.get(node)
        if report is None:
            bad[node] = "it did not answer within job.examine_s"
        elif report.faults:
            bad[node] = "; ".join(report.faults)
        elif some_have_gpus and report.gpus < gpus:
            bad[node] = f"{gpus} GPUs were granted, and torch can use {report.gpus}"
    return bad


def tell_apart(bad: dict[str, str], training: Sequence[str], rollout: Sequence[str]) -> Examination:
    """Tell the bad nodes that an attempt needs from those that it can do without.

    Args:
        training, rollout: names of the nodes of each.
    """
    nodes = [*training, *rollout]
    if len(nodes) > 1 and len(bad) == len(nodes):
        shared = (
            f"all {len(bad)} nodes are bad, so none is excluded: look at container and site.prolog "
            f"in the cluster file; {nodes[0]}: {bad[nodes[0]]}; then `qurl slurm submit` again"
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
    attempts = folder.attempts(run_dir)
    before = [attempt for attempt in attempts if attempt.decision == Decision.WITHOUT]
    if sum(attempt.job == job for attempt in before) >= MOST:
        raise ConfigError(
            f"nodes of this run were excluded {MOST} times already; {run_dir}/slurm/job.log says "
            "which, and why"
        )
    option = f"#SBATCH --exclude={','.join(excluding(job, names))}\n"
    script = folder.script(run_dir)
    commands.test_only(script.replace("#SBATCH --nodes=", f"{option}#SBATCH --nodes="))


def excluding(job: int, names: Sequence[str]) -> list[str]:
    """Return these nodes and those that a job was kept off before."""
    before = commands.job_facts(job).get("ExcNodeList", "(null)")
    excluded = [] if before == "(null)" else commands.hostnames(before)
    return sorted({*excluded, *names})
