"""Unit tests that meet GPUs where there are some, on a machine that has them."""

import os
import subprocess
import sys
from pathlib import Path

from qurl_megatron.testing import ranks

UNIT = Path(__file__).parents[1] / "unit"

CASES = {
    "test_transport": "gpu",  # CUDA's handles
    "test_transport_group": "nccl",  # NCCL, and peers that die or stop
    "test_engine_server": "test",  # the embedded engine takes a GPU where it finds one
    "test_bench_loss": "report",  # on the CPU all the same
    "test_dry_run": "cut or gpus",  # finds the same, and takes none
}
"""File -> which of its tests."""


def test_what_holds_on_the_cpu_holds_where_there_are_gpus(gpus):
    chosen = " or ".join(f"({file}.py and ({which}))" for file, which in CASES.items())
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", *(UNIT / f"{file}.py" for file in CASES)]
        + ["-k", chosen],
        env={**os.environ, **gpus, "EMULATED_CUDA_DEVICES": "6"},  # the longest cast of processes
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "skipped" not in done.stdout, done.stdout[-5000:]


def test_ranks_are_forked_unless_what_they_import_touches_cuda(nccl, monkeypatch):
    def forks() -> bool:
        ranks._fork_server.cache_clear()
        ranks._cuda_survives_the_fork.cache_clear()
        return ranks._cuda_survives_the_fork()

    assert forks()  # Megatron is among them
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "PRELOAD", ("tests.emulated.touches_cuda",))
        assert not forks()
    assert forks()
