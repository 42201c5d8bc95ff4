"""The device says in one sentence why it is not there."""

import os
import subprocess
import sys

import pytest
from emulated_cuda.build import __file__ as BUILD


@pytest.mark.parametrize(
    "command, code, sentence",
    [
        ([BUILD], 2, "the emulated CUDA device is compiled with g++, which is not installed"),
        (["-c", "import torch"], 1, f"is not built for this torch and these sources: run {BUILD}"),
    ],
    ids=["no compiler", "no binary"],
)
def test_what_is_missing_is_one_sentence(command, code, sentence, tmp_path):
    nothing = {"PATH": str(tmp_path), "EMULATED_CUDA_BUILD": str(tmp_path)}
    environment = {**os.environ, **nothing}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code
    assert sentence in done.stderr.splitlines()[-1]
