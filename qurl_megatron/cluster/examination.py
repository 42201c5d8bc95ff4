"""Examine the nodes of an attempt before its ranks start.

Each node measures itself, as a task of ``srun``: its GPUs as NVIDIA's driver sees them, a matrix
product on each, an all-reduce among them and with neighbouring nodes, and a kernel built by the
engines' compiler. Times are compared with the job's other nodes, which have the same GPUs.

A job with a bad node goes back to the queue, and the node is excluded. If all nodes are bad, other
nodes would be as well, and a person has to look.
"""

import contextlib
import ctypes
import json
import math
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median_low
from typing import Any

from qurl_megatron.cluster import commands, folder
from qurl_megatron.cluster.cluster import ClusterConfig
from qurl_megatron.cluster.layout import EXAMINATION_PREFIX, Allocation, examination
from qurl_megatron.cluster.links import announce, link_ms, step_place
from qurl_megatron.cluster.supervise import SrunStep, say
from qurl_megatron.cluster.verdict import Decision
from qurl_megatron.config.env import unseen_gpus
from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.kit.clock import shortest_ms
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.place import own_name

GIB = 1 << 30
MOST_USED = 4 * GIB
"""Memory in use on a GPU before the job starts; a driver takes less than 1 GiB for itself."""
REPEATS = 20
REDUCE_S = 60.0
"""Time for the all-reduces, NCCL's start included, before they count as hung."""
POLL_S = 0.1
GRACE_S = 10.0
MOST_EXCLUSIONS = 3
"""Attempts of a submitted run that may end for bad nodes; after more, something else is wrong."""

PRODUCT_SLOWER = 1.25
"""Times the job's median product. Sound GPUs of a kind differ by a few per cent, by power and heat;
one that is held back is a third slower or worse, and every other rank waits for it."""
REDUCE_SLOWER = 1.5
"""Times the job's median all-reduce: a link with fewer lanes doubles the time."""
CPUS_SLOWER = 20.0
"""The same between nodes without GPUs, where anything else on a node delays it."""
ADAPTERS, VERBS = Path("/sys/class/infiniband"), "libibverbs.so.1"


@dataclass(frozen=True)
class Report:
    """The findings of one node."""

    node: str
    faults: list[str]  # sentences that make it bad, whatever the others say
    gpus: int = 0  # that the driver shows
    devices: int = 0  # GPUs that torch can use
    product_ms: list[float] = field(default_factory=list)  # of each device
    reduce_ms: float | None = None  # None: it has no two devices; inf: it hangs or fails
    link_ms: float | None = None  # as ``links.link_ms`` returns it
    remark: str = ""  # of its network; no fault of the node


def measure_node(run_dir: Path) -> int:
    """Measure this node for a run, and print its report."""
    name = own_name()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # else a neighbour's fault fills job.log
    try:
        patience_s = folder.cluster(run_dir).job.examine_s / 3
        report = _measure(name, folder.recipe(run_dir).rollout, patience_s)
    except Exception as error:  # a sick GPU may raise anything, and that is a finding
        first_line = str(error).partition("\n")[0]  # CUDA goes on about how to debug it
        report = Report(name, [f"it could not be measured: {type(error).__name__}: {first_line}"])
        announce({})
    # In one write: otherwise another task's line may come in between.
    print(f"{json.dumps(asdict(report))}\n", end="", flush=True)
    if report.reduce_ms == math.inf or step_place()[1] > 1:
        os._exit(0)  # a thread that hangs, in the driver or with a neighbour, would keep it
    return 0


def _measure(name: str, rollout: RolloutConfig, patience_s: float) -> Report:
    nvml, indices, faults = _nvml(), [], []
    if nvml:
        indices = gpu_indices(nvml, os.environ)
    for index in indices:  # before torch takes memory of its own
        faults += [f"GPU {index} {fault}" for fault in gpu_faults(nvml, index)]
    import torch

    devices = []
    if torch.cuda.is_available():
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if indices and not devices:
        faults += filter(None, [unseen_gpus()])
    if devices and rollout.backend == "sglang" and not rollout.urls:
        from qurl_megatron.engines.sglang.starting_sglang import compiler_fault

        faults += filter(None, [compiler_fault(rollout)])
    product_ms = [_product_ms(device) for device in devices]
    reduce_ms, remark = _reduce_ms(devices), ""
    if devices and step_place()[1] > 1:
        adapters = os.listdir(ADAPTERS) if ADAPTERS.is_dir() else []
        remark = network_remark(
            adapters, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], os.environ
        )
    report = Report(name, faults, len(indices), len(devices), product_ms, reduce_ms, remark=remark)
    if reduce_ms == math.inf:
        announce({})
        return report
    return replace(report, link_ms=link_ms(devices, patience_s))


def network_remark(adapters: Sequence[str], lockable: int, env: Mapping[str, str]) -> str:
    """Return why NCCL will take sockets between nodes, or fail there; "" if no reason is seen.

    ``lockable`` are the bytes of memory that a process may lock; -1: any number.
    """
    sockets = "NCCL will take sockets between nodes, many times slower than InfiniBand: "
    if "NCCL_NET" in env or "NCCL_NET_PLUGIN" in env:
        return ""  # the site has chosen
    if env.get("NCCL_IB_DISABLE", "0") != "0":
        return f"{sockets}NCCL_IB_DISABLE is set"
    if not adapters:
        return f"{sockets}there is no adapter in {ADAPTERS}"
    try:
        ctypes.CDLL(VERBS)
    except OSError:
        return f"{sockets}{VERBS} cannot be loaded; install rdma-core, in a container's image too"
    if 0 <= lockable < GIB:
        return (
            f"NCCL will fail between nodes: a process may lock {lockable >> 10} KiB of memory "
            "(ulimit -l); have slurmd started with LimitMEMLOCK=infinity"
        )
    return ""


def _nvml() -> Any:
    """Return nvidia-ml-py, or None where it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def gpu_indices(nvml: Any, env: Mapping[str, str]) -> list[int]:
    """Return the driver's numbers of this step's GPUs; none where there is no driver.

    Where Slurm hides no device, CUDA_VISIBLE_DEVICES says which are ours.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no library, or no driver that answers it
        return []
    count = nvml.nvmlDeviceGetCount()
    parts = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = [int(part) for part in parts if part.isdecimal()]
    if 0 < len(visible) < count:
        return visible
    return list(range(count))


def gpu_faults(nvml: Any, index: int) -> Iterator[str]:
    """Yield the faults of a GPU that the driver reports."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    used = nvml.nvmlDeviceGetMemoryInfo(handle).used
    if used > MOST_USED:
        yield f"has {used / GIB:.1f} GiB in use already: end what holds them, or reset it"
    with contextlib.suppress(nvml.NVMLError_NotSupported):  # some kinds do not count errors
        uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        if nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, nvml.NVML_VOLATILE_ECC):
            yield "has uncorrected memory errors: reset it"
    with contextlib.suppress(nvml.NVMLError_NotSupported):
        _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
        if failed:
            yield "has no spare rows for bad memory: have it replaced"
        if pending:
            yield "waits for a reset to replace a bad row of memory"


def _product_ms(device) -> float:
    import torch

    first, second = (torch.ones(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))

    def product() -> None:
        torch.mm(first, second)
        torch.cuda.synchronize(device)

    return shortest_ms(product, REPEATS)


def _reduce_ms(devices: list) -> float | None:
    """Time an all-reduce among the devices; see ``Report.reduce_ms``."""
    if len(devices) < 2:
        return None
    import torch

    from qurl_megatron.wire.link import within

    def reduce() -> None:
        torch.cuda.nccl.all_reduce(parts)
        for device in devices:
            torch.cuda.synchronize(device)

    parts = [torch.ones(1 << 26, device=device) for device in devices]
    try:
        return within(REDUCE_S, lambda: shortest_ms(reduce, REPEATS), late=lambda: None)
    except RuntimeError:
        return math.inf


def examine(
    run_dir: Path,
    layout: Allocation,
    cluster: ClusterConfig,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, str]:
    """Have every node of the job measure itself, and return a sentence for each bad one."""
    if not cluster.job.examine_s:
        return {}
    nodes = commands.hostnames(os.environ["SLURM_JOB_NODELIST"])
    end = clock() + cluster.job.examine_s
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        running = SrunStep(examination(run_dir, layout, cluster), EXAMINATION_PREFIX, output)
        while (code := running.wait(POLL_S)) is None and not cancelled() and clock() < end:
            pass
        if code is None:
            running.end_within(GRACE_S)
        output.seek(0)
        reports = read_reports(output)
    if cancelled():
        return {}
    if not reports and code is not None:
        # All have ended without a report: it must be the examination's own fault.
        say("the examination of the nodes failed, as said above; it is left out")
        return {}
    for remark in sorted({report.remark for report in reports.values()} - {""}):
        alike = [node for node, report in reports.items() if report.remark == remark]
        say(f"{', '.join(sorted(alike))}: {remark}")
    if {report.link_ms for report in reports.values()} == {math.inf}:
        say("no two neighbouring nodes could reduce; that is left to the ranks, who will say why")
    return judge(reports, nodes, layout.whole.gpus)


def read_reports(lines: Iterable[str]) -> dict[str, Report]:
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


def judge(reports: Mapping[str, Report], nodes: Sequence[str], gpus: int) -> dict[str, str]:
    """Return a sentence for each bad node of a job with ``gpus`` on each; some sent no report."""
    peers = list(reports.values())
    bad = {}
    for node in nodes:
        if node not in reports:
            bad[node] = "it did not answer within job.examine_s"
        elif faults := [*reports[node].faults, *_beside(reports[node], peers, gpus)]:
            bad[node] = "; ".join(faults)
    return bad


def _beside(own: Report, peers: Sequence[Report], gpus: int) -> Iterator[str]:
    """Yield the faults that a node shows in comparison with all nodes of the job.

    GPUs are required only if some node has any: clusters without GPUs are for trying this out.
    """
    if own.faults and not own.devices:
        return  # it could not be measured
    some_have_gpus = any(peer.gpus or peer.devices for peer in peers)
    if some_have_gpus and min(own.gpus, own.devices) < gpus:
        yield (
            f"{gpus} GPUs were granted, the driver shows {own.gpus} and torch can use {own.devices}"
        )
    products = [ms for peer in peers for ms in peer.product_ms]
    for index, ms in enumerate(own.product_ms):
        yield from _slow(f"a matrix product on GPU {index}", ms, products, PRODUCT_SLOWER)
    if own.reduce_ms is not None:
        alike = [peer.reduce_ms for peer in peers if peer.devices == own.devices]
        reduces = [ms for ms in alike if ms is not None]
        name = "an all-reduce among its own devices"
        yield from _slow(name, own.reduce_ms, reduces, REDUCE_SLOWER)
    links = [peer.link_ms for peer in peers if peer.link_ms is not None]
    if own.link_ms is not None and len(links) == len(peers) and min(links) < math.inf:
        slower = REDUCE_SLOWER if some_have_gpus else CPUS_SLOWER
        yield from _slow("an all-reduce with either neighbour", own.link_ms, links, slower)


def _slow(name: str, ms: float, job_ms: Sequence[float], factor: float) -> Iterator[str]:
    """Yield a sentence where a time is ``factor`` times the job's median, or infinite."""
    usual_ms = median_low(job_ms)
    if ms == math.inf:
        yield f"{name} fails, or does not end"
    elif ms > factor * usual_ms:
        yield f"{name} takes {ms:.3g} ms, {usual_ms:.3g} on the job's others"


def refuse_exclusion(run_dir: Path, job: int, names: Sequence[str]) -> None:
    """Raise ``ConfigError`` if the run cannot go on without these nodes: Slurm has too few others,
    or nodes were excluded too often already."""
    attempts = folder.attempts(run_dir)
    before = [attempt for attempt in attempts if attempt.decision == Decision.WITHOUT]
    if sum(attempt.job == job for attempt in before) >= MOST_EXCLUSIONS:
        raise ConfigError(
            f"nodes of this run were excluded {MOST_EXCLUSIONS} times already; "
            f"{run_dir}/slurm/job.log says which, and why"
        )
    option = f"#SBATCH --exclude={','.join(excluding(job, names))}\n"
    script = folder.script(run_dir)
    commands.test_only(script.replace("#SBATCH --nodes=", f"{option}#SBATCH --nodes="))


def excluding(job: int, names: Sequence[str]) -> list[str]:
    """Return these nodes and those that a job was kept off before."""
    before = commands.job_facts(job).get("ExcNodeList", "(null)")
    excluded = set(names)
    if before != "(null)":
        excluded.update(commands.hostnames(before))
    return sorted(excluded)
