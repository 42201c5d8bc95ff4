"""Which nodes of a job are bad, as a function of what they said of themselves.

A node is compared with the others of its own job, which have the same GPUs and software: how long
a product should take need not be known. Only like is compared: GPUs with GPUs, an all-reduce with
those of as many devices, clocks with what most of them say.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median, median_low

from qurl_megatron.slurm.gpus import GpuState

GIB = 1 << 30


@dataclass(frozen=True)
class Report:
    """What one node said."""

    node: str
    at: float  # its clock when it spoke, Unix seconds
    gpus: list[GpuState] | None  # None: no driver
    devices: int  # GPUs that torch can use
    product_ms: list[float]  # of each device
    reduce_ms: float | None  # None: it has one device
    shm: int  # bytes free in /dev/shm
    tmp: int  # in /tmp
    folder: str = ""  # why the shared folder failed it; "" where it did not
    failed: str = ""  # why it could not be measured, which leaves nothing else to judge; "": it was
    heard_at: float | None = None  # the supervisor's clock when the node had spoken


@dataclass(frozen=True)
class NodeLimits:
    """From where on a node is bad."""

    gpu_slower: float = 1.25
    """Times the median. Sound GPUs of a kind differ by a few per cent, by power and heat; one that
    is held back is a third slower or worse, and every other rank waits for it."""

    cpu_slower: float = 20.0
    """The same without GPUs: a millisecond on a CPU that others use may well take ten."""

    reduce_slower: float = 1.5
    """Times the median, on GPUs: a link that has fallen back to fewer lanes doubles the time."""

    clock: float = 0.85
    """Times the median clock under load, which a power cap alone does not come under."""

    used: int = 4 * GIB
    """Bytes in use on a GPU without a process: a driver takes less than 1 GiB for itself."""

    shm: int = GIB
    """Bytes in /dev/shm: NCCL's ranks of a node and loaders of data meet there; containers that
    are started carelessly have 64 MiB."""

    tmp: int = GIB
    """Bytes in /tmp: kernels are compiled there."""

    skew_s: float = 5.0
    """Seconds from what most clocks say: what failed first is told by time. Speaking takes up to
    one."""


LIMITS = NodeLimits()


def judge(
    reports: Mapping[str, Report], wanted: Mapping[str, int], *, limits: NodeLimits = LIMITS
) -> dict[str, str]:
    """
    Args:
        reports: by node; nodes that did not answer are missing.
        wanted: GPUs that the job has on each of its nodes.

    Returns:
        A sentence for each bad node.
    """
    peers = list(reports.values())
    bad = {}
    for node, count in wanted.items():
        if node not in reports:
            bad[node] = "it did not answer within job.examine_s"
            continue
        if wrong := list(_wrong(reports[node], peers, count, limits)):
            bad[node] = "; ".join(wrong)
    return bad


def _wrong(own: Report, peers: list[Report], count: int, limits: NodeLimits) -> Iterator[str]:
    if own.folder:
        yield own.folder
    if own.failed:
        yield own.failed
        return
    for room, needed, where in ((own.shm, limits.shm, "/dev/shm"), (own.tmp, limits.tmp, "/tmp")):
        if room < needed:
            yield f"{where} has {room / GIB:.2f} GiB free, and {needed / GIB:g} are needed"
    yield from _of_clock(own, peers, limits.skew_s)
    if count and any(peer.gpus or peer.devices for peer in peers):
        yield from _of_gpus(own, peers, count, limits)
    if not own.devices and any(peer.devices for peer in peers):
        return  # its times are a CPU's
    yield from _of_product(own, peers, limits.gpu_slower if own.devices else limits.cpu_slower)
    yield from _of_reduce(own, peers, limits.reduce_slower if own.devices else limits.cpu_slower)


def _of_clock(own: Report, peers: list[Report], skew_s: float) -> Iterator[str]:
    """The supervisor's own clock may be the wrong one, and of two nobody knows which is."""
    offsets = [peer.at - peer.heard_at for peer in peers if peer.heard_at is not None]
    if own.heard_at is None or len(offsets) < 3:
        return
    off = own.at - own.heard_at - median_low(offsets)
    if abs(off) > skew_s:
        yield f"its clock is {off:+.0f} s off; have it follow a time server"


def _of_product(own: Report, peers: list[Report], slower: float) -> Iterator[str]:
    alike = [peer for peer in peers if bool(peer.devices) == bool(own.devices)]
    usual = median_low(ms for peer in alike for ms in peer.product_ms)
    for index, ms in enumerate(own.product_ms):
        if ms > slower * usual:
            device = f"GPU {index}" if own.devices else "its CPU"
            yield f"a matrix product on {device} takes {ms:.3g} ms, {usual:.3g} on the job's others"


def _of_reduce(own: Report, peers: list[Report], slower: float) -> Iterator[str]:
    if own.reduce_ms is None:
        return
    if own.reduce_ms == float("inf"):
        yield "an all-reduce among its own devices does not end"
        return
    # The longer the ring, the longer it takes.
    alike = [peer.reduce_ms for peer in peers if peer.devices == own.devices]
    usual = median_low(ms for ms in alike if ms is not None)
    if own.reduce_ms > slower * usual:
        yield (
            f"an all-reduce among its own devices takes {own.reduce_ms:.3g} ms, "
            f"{usual:.3g} on the job's others"
        )


FAULTS: tuple[tuple[Callable[[GpuState, NodeLimits], bool], str], ...] = (
    (lambda gpu, _: gpu.processes > 0, "is in use by another process: end it there"),
    (
        lambda gpu, limits: not gpu.processes and gpu.used > limits.used,
        "has memory in use that no process owns: reset it",
    ),
    (lambda gpu, _: gpu.uncorrected > 0, "has uncorrected memory errors: reset it"),
    (lambda gpu, _: gpu.remap_failed, "has no spare rows for bad memory: have it replaced"),
    (lambda gpu, _: gpu.remap_pending, "waits for a reset to replace a bad row of memory"),
)
"""What a GPU says of itself, and the sentence."""


def _of_gpus(own: Report, peers: list[Report], count: int, limits: NodeLimits) -> Iterator[str]:
    found = own.gpus or []
    if len(found) < count or own.devices < count:
        yield (
            f"{count} GPUs were granted, the driver shows {len(found)} and torch can use "
            f"{own.devices}"
        )
    usual = median([gpu.clock for peer in peers for gpu in peer.gpus or []] or [0])
    for gpu in found:
        for is_so, sentence in FAULTS:
            if is_so(gpu, limits):
                yield f"GPU {gpu.index} {sentence}"
        if gpu.held_back:
            yield f"GPU {gpu.index} is held back by {' and '.join(gpu.held_back)}"
        elif gpu.clock < limits.clock * usual:
            yield f"GPU {gpu.index} runs at {gpu.clock} MHz, the job's others at {usual:.0f}"
