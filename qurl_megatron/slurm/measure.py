"""``qurl slurm examine``: what one node of a job finds out about itself before models load.

It takes a few seconds: GPUs as the driver sees them, a matrix product on each, an all-reduce among
them, the shared folder in both directions, and free room. Without GPUs the product and the
all-reduce, of two threads, are the CPU's. What of it is bad, ``bad_nodes`` decides: a node alone
cannot know how fast the others are.
"""

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from qurl_megatron.errors import ConfigError
from qurl_megatron.observe.clock import now
from qurl_megatron.runtime.filesystem import wait_until_seen
from qurl_megatron.slurm import folder, gpus
from qurl_megatron.slurm.bad_nodes import Report

CANARY = "canary"
"""File that the supervisor leaves for the nodes, beside the nodes' own."""
REPEATS = 20
WAIT = timedelta(seconds=120)
"""Time-out of the groups themselves."""
REDUCE_S = 60.0
"""That the all-reduce may take, the groups' start included, before it counts as hung: less than
their own time-out, and little of job.examine_s."""


def examine(nodes: Path) -> int:
    """Measure this node, and say it on stdout and in a file of the folder ``nodes``.

    Two ways, so that a node which cannot write there is heard all the same.

    Raises:
        ConfigError: outside of a job, the folder is none of an attempt.
    """
    # In a step the file may be there and not seen yet; nobody else has one to wait for.
    if "SLURM_STEP_ID" not in os.environ and not (nodes / CANARY).exists():
        raise ConfigError(
            f"{nodes / CANARY} does not exist: `qurl slurm examine` runs inside a job, which gives "
            "it a folder of one of its attempts; RUN_DIR/slurm/attempts/N/nodes has what each node "
            "said"
        )
    name = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    try:
        report = _measure(name)
    except Exception as error:  # whatever a sick GPU raises is what the node has to say
        report = _unmeasured(name, error)
    try:
        wait_until_seen(nodes / CANARY, "the first node wrote it", key="train.run_dir")
        folder.put(nodes / f"{name}.json", as_json(report))
    except ConfigError as error:
        report = replace(report, folder=str(error))
    print(as_json(replace(report, at=now())), end="", flush=True)
    if report.reduce_ms == float("inf"):
        os._exit(0)  # threads that hang in the driver would keep the process from leaving
    return 0


def as_json(report: Report) -> str:
    return json.dumps(asdict(report)) + "\n"


def from_json(text: str) -> Report:
    """
    Raises:
        ValueError, TypeError: it is not what a node says.
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise TypeError(f"not a report: {text!r:.100}")
    found = value.get("gpus")
    return Report(**{**value, "gpus": found and [_gpu(one) for one in found]})


def _gpu(value: dict) -> gpus.GpuState:
    return gpus.GpuState(**{**value, "held_back": tuple(value["held_back"])})


def _measure(name: str) -> Report:
    nvml = _nvml()
    found = gpus.read(nvml, os.environ) if nvml else None
    import torch

    cuda = torch.cuda.is_available()
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if cuda else []
    product_ms = []
    for place, device in enumerate(devices or [torch.device("cpu")]):
        product_ms.append(_product_ms(device))
        if found and place < len(found):
            clock, held_back = gpus.clocks(nvml, found[place].index)
            found[place] = replace(found[place], clock=clock, held_back=held_back)
    return Report(
        node=name,
        at=now(),
        gpus=found,
        devices=len(devices),
        product_ms=product_ms,
        reduce_ms=_reduce_ms(devices or [torch.device("cpu")] * 2),
        shm=shutil.disk_usage("/dev/shm").free,
        tmp=shutil.disk_usage("/tmp").free,
    )


def _unmeasured(name: str, error: Exception) -> Report:
    first = str(error).partition("\n")[0]  # CUDA goes on about how to debug it
    return Report(
        node=name,
        at=now(),
        gpus=None,
        devices=0,
        product_ms=[],
        reduce_ms=None,
        shm=0,
        tmp=0,
        failed=f"it could not be measured: {type(error).__name__}: {first}",
    )


def _nvml():
    """nvidia-ml-py; None where it is not installed, as on clusters without GPUs."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _product_ms(device) -> float:
    """The shortest of some: others may take part of a CPU, and a GPU's first is slow."""
    import torch

    gpu = device.type == "cuda"
    torch.set_num_threads(1)  # threads that wait for each other measure who else is there
    size, dtype = (8192, torch.bfloat16) if gpu else (256, torch.float32)
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))

    def product() -> None:
        torch.mm(left, right)
        if gpu:
            torch.cuda.synchronize(device)

    return _shortest_ms(product)


def _reduce_ms(devices: list) -> float | None:
    """All-reduce among the devices, one thread for each; None for one alone, inf: it hangs."""
    if len(devices) < 2:
        return None
    import torch
    from torch import distributed as dist

    # All are on this machine; without it gloo looks the host's name up, which may fail.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store, found = dist.HashStore(), {}

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

        found[number] = _shortest_ms(reduce)

    threads = [threading.Thread(target=rank, args=each, daemon=True) for each in enumerate(devices)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + REDUCE_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return max(found.values()) if len(found) == len(devices) else float("inf")


def _shortest_ms(body: Callable[[], None]) -> float:
    body()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        body()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)
