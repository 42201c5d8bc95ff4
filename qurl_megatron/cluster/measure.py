"""``qurl slurm examine``: what one node of a job finds out about itself before models load.

It takes a few seconds: GPUs as NVIDIA's driver sees them, a matrix product on each, and an
all-reduce among them. Without GPUs the product and the all-reduce, of two threads, are the CPU's.
Whether its times make a node bad, ``examination`` decides: a node alone cannot know how fast the
others are.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

GIB = 1 << 30
MOST_USED = 4 * GIB
"""Memory in use on a GPU before the job starts; a driver takes less than 1 GiB for itself."""
REPEATS = 20
WAIT = timedelta(seconds=120)
"""Time-out of the groups themselves."""
REDUCE_S = 60.0
"""That the all-reduce may take, the groups' start included, before it counts as hung: less than
their own time-out, and little of job.examine_s."""


@dataclass(frozen=True)
class Report:
    """What one node says."""

    node: str
    faults: list[str]  # sentences on what makes it bad, whatever the others say
    gpus: int = 0  # that the driver shows
    devices: int = 0  # GPUs that torch can use
    product_ms: list[float] | None = None  # of each device; None: it could not be measured
    reduce_ms: float | None = None  # None: it has one device; inf: it hangs or fails

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def examine() -> int:
    """Measure this node, and print its report."""
    name = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    try:
        report = _measure(name)
    except Exception as error:  # whatever a sick GPU raises is what the node has to say
        first = str(error).partition("\n")[0]  # CUDA goes on about how to debug it
        report = Report(name, [f"it could not be measured: {type(error).__name__}: {first}"])
    print(report.as_json(), flush=True)
    if report.reduce_ms == float("inf"):
        os._exit(0)  # threads that hang in the driver would keep the process from leaving
    return 0


def _measure(name: str) -> Report:
    nvml = _nvml()
    indices = gpu_indices(nvml, os.environ) if nvml else []
    faults = [
        f"GPU {index} {fault}" for index in indices for fault in gpu_faults(nvml, index)
    ]  # before torch takes memory of its own
    import torch

    cuda = torch.cuda.is_available()
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if cuda else []
    return Report(
        node=name,
        faults=faults,
        gpus=len(indices),
        devices=len(gpus),
        product_ms=[_product_ms(device) for device in gpus or [torch.device("cpu")]],
        reduce_ms=_reduce_ms(gpus or [torch.device("cpu")] * 2),
    )


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
    visible = [
        int(part) for part in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.isdecimal()
    ]
    return visible if visible and len(visible) < count else list(range(count))


def gpu_faults(nvml: Any, index: int) -> Iterator[str]:
    """Yield what the driver says against a GPU."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    used = nvml.nvmlDeviceGetMemoryInfo(handle).used
    if used > MOST_USED:
        yield f"has {used / GIB:.1f} GiB in use already: end what holds them, or reset it"
    if _ask(
        nvml,
        nvml.nvmlDeviceGetTotalEccErrors,
        *(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
    ):
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

    gpu = device.type == "cuda"
    torch.set_num_threads(1)  # threads that wait for each other measure who else is there
    size, dtype = (8192, torch.bfloat16) if gpu else (256, torch.float32)
    first, second = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))

    def product() -> None:
        torch.mm(first, second)
        if gpu:
            torch.cuda.synchronize(device)

    return _shortest_ms(product)


def _reduce_ms(devices: list) -> float | None:
    """Time an all-reduce among the devices, one thread for each; see ``Report.reduce_ms``."""
    if len(devices) < 2:
        return None
    import torch
    from torch import distributed as dist

    # All are on this machine; without it gloo looks the host's name up, which may fail.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store, times = dist.HashStore(), {}

    def rank(number: int, device: torch.device) -> None:
        gpu = device.type == "cuda"
        group: Any  # torch's types leave out the time limit, and what all groups can
        if gpu:
            torch.cuda.set_device(device)
            group = dist.ProcessGroupNCCL(store, number, len(devices), WAIT)  # type: ignore[arg-type]
        else:
            group = dist.ProcessGroupGloo(store, number, len(devices), WAIT)
        data = torch.ones(1 << 26 if gpu else 1 << 16, device=device)

        def reduce() -> None:
            group.allreduce([data]).wait()
            if gpu:
                torch.cuda.synchronize(device)

        times[number] = _shortest_ms(reduce)

    threads = [threading.Thread(target=rank, args=each, daemon=True) for each in enumerate(devices)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + REDUCE_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return max(times.values()) if len(times) == len(devices) else float("inf")


def _shortest_ms(body: Callable[[], None]) -> float:
    """Time the fastest of some calls: others may use the device, and a GPU's first is slow."""
    body()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        body()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)
