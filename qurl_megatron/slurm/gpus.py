"""What NVIDIA's driver says of a node's GPUs, as plain data, by way of nvidia-ml-py.

The library is an argument: it can be read where there is no GPU, from what one has said.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HELD_BACK = {
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "heat",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "heat",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "the power supply",
}
"""Reasons for low clocks that a sound GPU does not have; a power cap is none of them."""


@dataclass(frozen=True)
class GpuState:
    """One GPU, before anything of this job ran on it; clocks: under load."""

    index: int
    processes: int  # that compute on it
    used: int  # bytes of its memory
    uncorrected: int  # ECC errors since the driver was loaded; 0 where it does not count them
    remap_failed: bool  # a row of its memory is bad, and there is none to replace it
    remap_pending: bool  # a bad row is replaced once the GPU is reset
    clock: int = 0  # MHz of its multiprocessors
    held_back: tuple[str, ...] = ()  # of HELD_BACK


def read(nvml: Any, env: Mapping[str, str]) -> list[GpuState] | None:
    """The GPUs of this step.

    Args:
        nvml: the module pynvml.
        env: of this step. Where Slurm hides no device, CUDA_VISIBLE_DEVICES says which are ours.

    Returns:
        None where there is no driver.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no library, or no driver that answers it
        return None
    count = nvml.nvmlDeviceGetCount()
    own = [int(one) for one in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.isdecimal()]
    indices = own if own and len(own) < count else range(count)
    return [_gpu(nvml, index) for index in indices]


def _gpu(nvml: Any, index: int) -> GpuState:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    remapped = _asked(nvml, nvml.nvmlDeviceGetRemappedRows, handle)
    uncorrected = _asked(
        nvml,
        nvml.nvmlDeviceGetTotalEccErrors,
        *(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
    )
    _, _, pending, failed = remapped or (0, 0, 0, 0)
    return GpuState(
        index,
        processes=len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
        used=nvml.nvmlDeviceGetMemoryInfo(handle).used,
        uncorrected=uncorrected or 0,
        remap_failed=bool(failed),
        remap_pending=bool(pending),
    )


def clocks(nvml: Any, index: int) -> tuple[int, tuple[str, ...]]:
    """MHz and what holds them back; to be asked under load."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    reasons = _asked(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    held = {word for name, word in HELD_BACK.items() if reasons & getattr(nvml, name)}
    return nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM), tuple(sorted(held))


def _asked(nvml: Any, question: Any, *arguments: Any) -> Any:
    """None where this kind of GPU does not have what is asked for."""
    try:
        return question(*arguments)
    except nvml.NVMLError_NotSupported:
        return None
