"""The machine of a benchmark: hardware, versions, commit, load."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from qurl_megatron.kit.clock import now

INSTRUCTIONS = {  # a flag of /proc/cpuinfo, and its name
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


def environment() -> dict[str, Any]:
    """Return all facts of this machine and installation."""
    cpuinfo = _cpuinfo()
    flags = (cpuinfo.get("flags") or cpuinfo.get("Features") or "").split()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpuinfo.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "memory_gib": round(memory, 1),
        "instructions": [name for flag, name in INSTRUCTIONS.items() if flag in flags],
        "gpus": gpus(),
        "python": platform.python_version(),
        "versions": _versions(),
        "commit": commit(Path(__file__).parent),
        "load_before": load(),
    }


def load() -> float:
    return round(os.getloadavg()[0], 2)


def started() -> str:
    """Now, as a record writes it."""
    return datetime.fromtimestamp(now(), UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def commit(folder: Path) -> str | None:
    """Of the repository, "+changes" where tracked files differ from it; None outside of one."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("+changes" if git("status", "--porcelain", "-uno") else "")
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
    devices = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
        devices.append(
            {"name": pynvml.nvmlDeviceGetName(handle), "memory_gib": round(memory / 2**30, 1)}
        )
    pynvml.nvmlShutdown()
    return devices


def _cpuinfo() -> dict[str, str]:
    """Of the first core."""
    file = Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8").partition("\n\n")[0] if file.is_file() else ""
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
