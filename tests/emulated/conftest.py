"""This package on GPUs that are not there: ``tests/emulated_cuda`` makes torch find them.

The test itself sees none of them. They are there in the processes that it starts with ``gpus`` in
their environment, and in the nccl ranks of a test that asks for ``nccl``.
"""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.support import ranks

ROOT = Path(__file__).parents[2]
EMULATOR = ROOT / "tests" / "emulated_cuda"
COUNT = 4


@pytest.fixture(scope="session")
def gpus() -> dict[str, str]:
    """The environment in which torch finds ``COUNT`` GPUs, with fresh memory full of NaN."""
    built = subprocess.run(
        [sys.executable, EMULATOR / "emulated_cuda" / "build.py"], capture_output=True, text=True
    )
    if built.returncode == 2:
        pytest.skip(built.stderr.strip())
    assert built.returncode == 0, built.stderr
    path = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": os.pathsep.join([str(EMULATOR), str(ROOT), *([path] if path else [])]),
        "EMULATED_CUDA_DEVICES": str(COUNT),
        "EMULATED_CUDA_POISON": "1",
    }


@pytest.fixture(scope="session")
def nccl(gpus) -> str:
    """The backend for ``run_on_ranks`` whose ranks have the GPUs."""
    there = {**ranks.ENVIRONMENT["nccl"], **gpus}
    with (
        mock.patch.dict(ranks.ENVIRONMENT, nccl=there),
        mock.patch.object(torch.cuda, "device_count", lambda: COUNT),
    ):
        yield "nccl"
