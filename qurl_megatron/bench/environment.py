"""What a benchmark ran on: hardware, versions, commit, load, and what the machine can do at most.

The limits are measured, not read off a data sheet: the rate at which all cores together read
memory, and the fastest matrix products of each number format. A figure beside them shows how much
there is left to gain.
"""

import os
import platform
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from qurl_megatron.observe.clock import now

INSTRUCTIONS = {  # a flag of /proc/cpuinfo, and what it is called
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_int8": "AMX INT8",
    "amx_bf16": "AMX BF16",
    "sha_ni": "SHA",
    # Of ARM
    "asimddp": "INT8 dot products",
    "i8mm": "INT8 matrices",
    "bf16": "BF16 matrices",
    "sve": "SVE",
    "sha2": "SHA",
}
PACKAGES = ("torch", "megatron-core", "sglang", "vllm", "transformers", "numpy")
HARDWARE = ("cpu", "cores", "instructions", "gpus")
"""Keys that two records must share for their times to be compared."""

SIZE = 1024  # of the square products that are timed
READ_MIB = 256  # more than caches hold
ON_A_GPU = 8  # times as much of both: less does not keep all of its units at work
TIMES = 5  # the fastest counts


def environment(repository: Path | None = None) -> dict[str, Any]:
    """All but the limits, which need torch: what is known at once.

    Args:
        repository: whose commit is given; default: the one this file lies in.
    """
    cpuinfo = _cpuinfo()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpuinfo.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "memory_gib": round(memory, 1),
        "instructions": instructions(cpuinfo.get("flags") or cpuinfo.get("Features") or ""),
        "gpus": gpus(),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := version(name))},
        "commit": commit(repository or Path(__file__).parent),
        "load_before": load(),
    }


def load() -> float:
    return round(os.getloadavg()[0], 2)


def beside(environment: dict[str, Any]) -> list[str]:
    """What else a record's machine did, in a few words; nothing where it is not known."""
    if "others" in environment:
        return [f"others used {environment['others']:.0%} of the cores"]
    loads = [environment[key] for key in ("load_before", "load_after") if key in environment]
    return [f"load {' to '.join(f'{load:.2g}' for load in loads)}"] if loads else []


def started() -> str:
    """Now, as a record writes it."""
    return datetime.fromtimestamp(now(), UTC).isoformat(timespec="seconds")


def instructions(flags: str) -> list[str]:
    """Of ``INSTRUCTIONS``, those that a line of flags names."""
    have = set(flags.split())
    return [name for flag, name in INSTRUCTIONS.items() if flag in have]


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit(folder: Path) -> str | None:
    """Of the repository, "+changes" where tracked files differ from it; None outside of one."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        found = git("rev-parse", "--short=12", "HEAD")
        return found + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (FileNotFoundError, subprocess.CalledProcessError):  # no git, or installed by pip
        return None


def gpus() -> list[dict[str, Any]]:
    """Name and memory of each, as NVML reports them; empty where there is none."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return []
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
        found.append(
            {"name": pynvml.nvmlDeviceGetName(handle), "memory_gib": round(memory / 2**30, 1)}
        )
    pynvml.nvmlShutdown()
    return found


def _cpuinfo() -> dict[str, str]:
    """Of the first core."""
    file = Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8").partition("\n\n")[0] if file.is_file() else ""
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


@cache
def limits(device: str = "cpu") -> dict[str, float]:
    """``measured_limits`` with the threads that torch has at the first call, measured once."""
    return measured_limits(device)


def measured_limits(device: str) -> dict[str, float]:
    """The most that the machine does with the threads that torch has now: GB/s read from memory,
    and GFLOP/s (for INT8 10^9 operations per second) of products. A second on two cores.

    Returns:
        ``read_gb_s``, ``int8_gop_s``, ``bf16_gflop_s``, ``fp32_gflop_s``; also ``fp8_gflop_s`` on
        GPUs with units for it.
    """
    import torch

    size = SIZE if device == "cpu" else SIZE * ON_A_GPU
    kinds = {
        "int8_gop_s": (torch.int8, torch._int_mm),
        "bf16_gflop_s": (torch.bfloat16, torch.mm),
        "fp32_gflop_s": (torch.float32, torch.mm),
    }
    with torch.inference_mode():
        if device != "cpu" and torch.cuda.get_device_capability(device) >= (8, 9):
            one = torch.ones((), device=device)
            product = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
            kinds["fp8_gflop_s"] = torch.float8_e4m3fn, product
        found = {"read_gb_s": _read_gb_s(torch.device(device))}
        for name, (kind, multiply) in kinds.items():
            # Not of ones or zeros, with which chips draw less power and run faster.
            a, b = (torch.randint(-100, 100, (size, size), device=device).to(kind) for _ in "ab")
            # The second as weights lie: [out, in].
            seconds = fastest(partial(multiply, a, b.t()), device)
            found[name] = _digits(2 * size**3 / 1e9 / seconds)
    return found


def _read_gb_s(device) -> float:
    import torch

    mib = READ_MIB if device.type == "cpu" else READ_MIB * ON_A_GPU
    data = torch.ones(mib << 18, device=device).view(-1, 4096)  # float32
    vector = torch.ones(4096, device=device)
    # A product with a vector reads every number once, and so does a sum.
    ways = (lambda: torch.mv(data, vector), lambda: data.sum())
    seconds = min(fastest(way, str(device)) for way in ways)
    return _digits(data.nbytes / 1e9 / seconds)


def _digits(rate: float) -> float:
    """Four digits of it; a place after the point would make a small rate 0, which none is."""
    return float(f"{rate:.4g}")


def fastest(act: Callable[[], object], device: str = "cpu") -> float:
    """Seconds of the fastest of some calls, after one that does not count."""
    import torch

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    seconds = []
    for _ in range(TIMES + 1):
        wait()
        start = time.perf_counter()
        act()
        wait()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
