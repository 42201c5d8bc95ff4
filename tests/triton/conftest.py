"""One set of comparisons, on the CPU through triton's interpreter and on a GPU if there is one."""

import importlib.util
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = importlib.util.find_spec("triton") is not None


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    if not HERE:
        pytest.skip("triton is not installed; make test-triton brings it")
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("on the CPU kernels run under TRITON_INTERPRET=1")
    if request.param == "cuda" and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("needs a CUDA device, and no TRITON_INTERPRET")
    return request.param
