"""Whether Triton's kernels run: the memory-bound passes over weights and logits.

The kernels are ``algo.fused_vocabulary`` and ``quant.fused_channels``; torch operations beside each
are its reference, and run wherever ``has_kernels_for`` says no. Only those two modules import
triton, and they are imported only where it says yes: elsewhere triton would cost start-up time.
"""

import functools
import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

SWITCH = "QURL_TRITON"
"""Set to 0 in the environment: torch's operations everywhere."""

FORMATS = (torch.bfloat16, torch.float16, torch.float32)


def has_kernels_for(tensor: Tensor) -> bool:
    """Return whether the kernels take this tensor: on a GPU, and where triton can run.

    Under ``TRITON_INTERPRET=1`` triton runs kernels on the CPU, so they take tensors there too.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (
        (tensor.is_cuda or interpreted)
        and os.environ.get(SWITCH) != "0"
        and tensor.dtype in FORMATS
        and tensor.numel() > 0
        and _can_run(interpreted)
    )


@functools.cache
def _can_run(interpreted: bool) -> bool:
    """Return whether triton is there, with the compiler that it needs for its first kernel."""
    installed = find_spec("triton") is not None
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return installed and (interpreted or (bool(compiler) and headers.exists()))
