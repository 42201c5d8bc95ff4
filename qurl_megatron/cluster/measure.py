"""``qurl slurm examine``: one node of a job measures itself before models load.

It takes a few seconds: GPUs as NVIDIA's driver sees them, a matrix product on each, and an
all-reduce among them. Whether its times make a node bad, ``examination`` decides: a node alone
cannot know how fast the others are.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

GIB = 1 << 30
MOST_USED = 4 * GIB
"""Memory in use on a GPU before the job starts; a driver takes less than 1 GiB for itself."""
REPEATS = 20
REDUCE_S = 60.0
"""Time for the all-reduces, NCCL's start included, before they count as hung."""


@dataclass(frozen=True)
class Report:
    """The findings of one node."""

    node: str
    faults: list[str]  # each a sentence on what makes it bad, whatever the others say
    gpus: int = 0  # that the driver shows
    devices: int = 0  # GPUs that torch can use
    product_ms: list[float] = field(default_factory=list)  # of each device
    reduce_ms: float | None = None  # None: it has no two devices; inf: it hangs or fails

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def examine() -> int:
    """Measure this node, and print its report."""
    name = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    try:
        report = _measure(name)
    except Exception as error:  # a sick GPU may raise anything, and that is a finding
        first_line = str(error).partition("\n")[0]  # CUDA goes on about how to debug it
        report = Report(name, [f"it could not be measured: {type(error).__name__}: {first_line}"])
    print(report.as_json(), flush=True)
    if report.reduce_ms == float("inf"):
        os._exit(0)  # a thread that hangs in the driver would keep the process from leaving
    return 0


def _measure(name: str) -> Report:
    nvml = _nvml()
    indices = gpu_indices(nvml, os.environ) if nvml else []
    faults = []
    for index in indices:  # before torch takes memory of its own
        faults += [f"GPU {index} {fault}" for fault in gpu_faults(nvml, index)]
    import torch

    devices = []
    if torch.cuda.is_available():
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    product_ms = [_product_ms(device) for device in devices]
    return Report(name, faults, len(indices), len(devices), product_ms, _reduce_ms(devices))


def _nvml() -> Any:
    """Return nvidia-ml-py; None where it is not installed, as on clusters without GPUs."""
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
    return visible if visible and len(visible) < count else list(range(count))


def gpu_faults(nvml: Any, index: int) -> Iterator[str]:
    """Yield the driver's findings against a GPU."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    used = nvml.nvmlDeviceGetMemoryInfo(handle).used
    if used > MOST_USED:
        yield f"has {used / GIB:.1f} GiB in use already: end what holds them, or reset it"
    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    if _ask(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, *uncorrected):
        yield "has uncorrected memory errors: reset it"
    _, _, pending, failed = _ask(nvml, nvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
    if failed:
        yield "has no spare rows for bad memory: have it replaced"
    if pending:
        yield "waits for a reset to replace a bad row of memory"


def _ask(nvml: Any, question: Any, *arguments: Any) -> Any:
    """Return the driver's answer; None where this kind of GPU has none."""
    try:
        return question(*arguments)
    except nvml.NVMLError_NotSupported:
        return None


def _product_ms(device) -> float:
    import torch

    first, second = (torch.ones(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))

    def product() -> None:
        torch.mm(first, second)
        torch.cuda.synchronize(device)

    return _shortest_ms(product)


def _reduce_ms(devices: list) -> float | None:
    """Time an all-reduce among the devices; see ``Report.reduce_ms``."""
    if len(devices) < 2:
        return None
    import torch

    times = []

    def reduce() -> None:
        torch.cuda.nccl.all_reduce(parts)
        for device in devices:
            torch.cuda.synchronize(device)

    def measure() -> None:
        times.append(_shortest_ms(reduce))

    parts = [torch.ones(1 << 26, device=device) for device in devices]
    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    thread.join(REDUCE_S)
    return times[0] if times else float("inf")


def _shortest_ms(body: Callable[[], None]) -> float:
    """Time the fastest of some calls: others may use the device, and a GPU's first is slow."""
    body()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        body()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)
