"""The machine that ``benchmarks/gpu_hour.py`` finds: versions beside the pins, its GPU's memory, or
an emulated GPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from qurl_megatron.kit.errors import ConfigError

ROOT = Path(__file__).parents[1]
EMULATOR = ROOT / "tests" / "emulated_cuda"
PATIENCE_S = 60.0


def pins(path: Path) -> dict[str, str]:
    """Return the version of each package that a requirements file pins for this Python."""
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    versions = {}
    for requirement in map(Requirement, filter(None, lines)):
        pin = str(requirement.specifier)
        if pin.startswith("==") and (not requirement.marker or requirement.marker.evaluate()):
            versions[requirement.name] = pin.removeprefix("==")
    return versions


LOOK = """
import importlib.metadata, json, sys
packages = importlib.metadata.distributions()
print(json.dumps({each.name: each.version for each in packages if each.name in sys.argv[1:]}))
"""


def versions(sglang: str) -> dict[str, Any]:
    """Return the versions that are installed, and how they differ from the pins.

    Args:
        sglang: the Python that has it; "": none.
    """
    facts: dict[str, Any] = {"differ": []}
    for role, python in (("trainer", sys.executable), ("sglang", sglang)):
        if not python:
            continue
        pinned = pins(ROOT / f"requirements/gpu-{role}.txt")
        installed = json.loads(subprocess.check_output([python, "-c", LOOK, *pinned]))
        facts[role] = installed
        for name, version in pinned.items():
            if installed.get(name, "").partition("+")[0] != version:
                own = installed.get(name, "not installed")
                facts["differ"].append(f"{role}: {name} {own}, pinned {version}")
    return facts


def memory_in_use() -> int:
    """Return the MiB in use on all GPUs together; 0 where there is none."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, check=True, capture_output=True, text=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return 0
    return sum(int(line) for line in done.stdout.split())


def settle(used_before: int) -> None:
    """Wait until the GPU's memory is as free as before: the next engine takes what it finds."""
    until = time.monotonic() + PATIENCE_S
    while memory_in_use() > used_before + 500 and time.monotonic() < until:
        time.sleep(1)


def emulated() -> dict[str, str]:
    """Return the environment in which torch finds a GPU that is not there.

    Raises:
        ConfigError: it cannot be built here; says why.
    """
    build = [sys.executable, str(EMULATOR / "emulated_cuda" / "build.py")]
    built = subprocess.run(build, capture_output=True, text=True)
    if built.returncode:
        raise ConfigError(f"no GPU is here, and none can be emulated: {built.stderr.strip()}")
    return {
        "PYTHONPATH": os.pathsep.join([str(EMULATOR), str(ROOT)]),
        "EMULATED_CUDA_DEVICES": "1",
        "EMULATED_CUDA_POISON": "1",
        "OMP_NUM_THREADS": "1",
    }
