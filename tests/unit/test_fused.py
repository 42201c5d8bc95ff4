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


def test_tensors_on_a_gpu_are_taken_and_others_are_not(installed):
    weight = torch.ones(2, 3)
    assert has_kernels_for(OnGPU(weight)) and has_kernels_for(OnGPU(weight.bfloat16()))
    assert not has_kernels_for(weight)


def test_without_triton_torch_does_it(installed):
    installed.setattr(fused, "find_spec", lambda name: None)
    assert not has_kernels_for(OnGPU(torch.ones(2, 3)))


@pytest.mark.parametrize(
    ("compiler", "cc", "headers", "runs"),
    [
        (None, None, True, False),
        (None, "/opt/cc", True, True),
        ("/usr/bin/gcc", None, False, False),
        ("/usr/bin/gcc", None, True, True),
    ],
)
def test_without_what_triton_builds_its_launcher_with_torch_does_it(
    installed, compiler, cc, headers, runs
):
    installed.setattr(fused.shutil, "which", lambda name: compiler)
    installed.setattr(fused.Path, "exists", lambda path: headers or path.name != "Python.h")
    if cc:
        installed.setenv("CC", cc)
    assert has_kernels_for(OnGPU(torch.ones(2, 3))) == runs


def test_the_switch_leaves_everything_to_torch(installed):
    installed.setenv("QURL_TRITON", "0")
    assert not has_kernels_for(OnGPU(torch.ones(2, 3)))
    installed.setenv("QURL_TRITON", "1")
    assert has_kernels_for(OnGPU(torch.ones(2, 3)))


@pytest.mark.parametrize(
    "tensor", [torch.ones(2, 3).double(), torch.ones(0, 3), torch.ones(2).int()]
)
def test_other_formats_and_empty_tensors_are_left_to_torch(installed, tensor):
    assert not has_kernels_for(OnGPU(tensor))


def test_the_interpreter_takes_tensors_of_the_cpu(installed):
    installed.setenv("TRITON_INTERPRET", "1")
    installed.setattr(fused.shutil, "which", lambda name: None)
    assert has_kernels_for(torch.ones(2, 3))
