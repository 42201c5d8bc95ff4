"""Which tensors the kernels for GPUs take; tests/triton runs them."""

import pytest
import torch

from qurl_megatron import fused
from qurl_megatron.fused import SWITCH, has_kernels_for


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(fused, "_installed", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv(SWITCH, raising=False)
    return monkeypatch


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
    installed.setattr(fused, "_installed", lambda: False)
    assert not has_kernels_for(OnGPU(torch.ones(2, 3)))


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
    assert has_kernels_for(torch.ones(2, 3))
