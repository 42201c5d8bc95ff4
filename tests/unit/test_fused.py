"""Which tensors the kernels for GPUs take; tests/triton runs them."""

import pytest
import torch

from qurl_megatron.kit import fused
from qurl_megatron.kit.fused import SWITCH, has_kernels_for


@pytest.fixture
def installed(monkeypatch):
    """All that the kernels need, but no GPU."""
    monkeypatch.setattr(fused, "find_spec", lambda name: name)
    monkeypatch.setattr(fused.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(fused.Path, "exists", lambda path: True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv(SWITCH, raising=False)
    fused._can_run.cache_clear()
    yield monkeypatch
    fused._can_run.cache_clear()


class OnGPU:
    """What is asked of a tensor before a kernel takes it."""

    is_cuda = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.numel = tensor.dtype, tensor.numel


@pytest.mark.parametrize(
    ("tensor", "runs"),
    [
        (OnGPU(torch.ones(2, 3)), True),
        (OnGPU(torch.ones(2, 3).bfloat16()), True),
        (torch.ones(2, 3), False),
        (OnGPU(torch.ones(2, 3).double()), False),
        (OnGPU(torch.ones(0, 3)), False),
        (OnGPU(torch.ones(2).int()), False),
    ],
)
def test_floats_on_a_gpu_are_taken_and_all_else_is_left_to_torch(installed, tensor, runs):
    assert has_kernels_for(tensor) == runs


@pytest.mark.parametrize(
    ("triton", "compiler", "headers", "env", "runs"),
    [
        (False, True, True, {}, False),
        (True, False, True, {}, False),
        (True, False, True, {"CC": "/opt/cc"}, True),
        (True, True, False, {}, False),
        (True, True, True, {SWITCH: "0"}, False),
        (True, True, True, {SWITCH: "1"}, True),
    ],
)
def test_without_triton_or_what_it_builds_its_launcher_with_torch_does_it(
    installed, triton, compiler, headers, env, runs
):
    installed.setattr(fused, "find_spec", lambda name: triton or None)
    installed.setattr(fused.shutil, "which", lambda name: "/usr/bin/gcc" if compiler else None)
    installed.setattr(fused.Path, "exists", lambda path: headers or path.name != "Python.h")
    for name, value in env.items():
        installed.setenv(name, value)
    assert has_kernels_for(OnGPU(torch.ones(2, 3))) == runs


def test_the_interpreter_takes_tensors_of_the_cpu(installed):
    installed.setenv("TRITON_INTERPRET", "1")
    installed.setattr(fused.shutil, "which", lambda name: None)
    assert has_kernels_for(torch.ones(2, 3))
