"""Tests of other rooms that meet GPUs where there are some, on machines that have them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[1] / "unit"

# By the number of GPUs: file -> which of its tests.
CASES = {
    1: {
        "test_bench_micro": "every_way",  # two ranks on the CPU all the same
        "test_dry_run": "cut or gpus",  # finds the same, and takes none
        "test_engine_server": "test",  # the embedded engine takes the one that it finds
    },
    8: {
        "test_transport": "gpu",  # CUDA's handles
        "test_transport_group": "nccl",  # each process of a cast has a GPU; some die, some stop
    },
}


@pytest.mark.parametrize("count", CASES)
def test_what_holds_on_the_cpu_holds_where_there_are_gpus(count, gpus):
    chosen = " or ".join(f"({file}.py and ({which}))" for file, which in CASES[count].items())
    files = [UNIT / f"{file}.py" for file in CASES[count]]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", *files, "-k", chosen],
        env={**os.environ, **gpus, "EMULATED_CUDA_DEVICES": str(count)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "skipped" not in done.stdout, done.stdout[-5000:]
