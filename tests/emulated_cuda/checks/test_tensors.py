"""Tensors on the emulated device: CUDA's strictness about devices and generators."""

import pytest
import torch


def cuda(*shape, **kind):
    return torch.randn(*shape, device="cuda", **kind)


def test_devices_are_found():
    assert torch.cuda.is_available() and torch.cuda.device_count() == 4
    assert "H100" in torch.cuda.get_device_name(0)
    assert torch.cuda.get_device_capability() == (9, 0)
    uuids = {str(torch.cuda.get_device_properties(i).uuid) for i in range(4)}
    assert len(uuids) == 4


INT8 = torch.ones(16, 16, dtype=torch.int8)
DEVICES = "same device|either on cpu or on the same device"
REFUSED = {
    "add": (lambda a: a + torch.ones(4, 5), DEVICES),
    "linear": (lambda a: torch.nn.functional.linear(a, torch.ones(3, 5)), DEVICES),
    "cat": (lambda a: torch.cat([a, torch.ones(4, 5)]), DEVICES),
    "where": (lambda a: torch.where(a > 0, a, torch.ones(4, 5)), DEVICES),
    "gather": (lambda a: a.gather(0, torch.zeros(4, 5, dtype=torch.int64)), DEVICES),
    "index_select": (lambda a: a.index_select(0, torch.tensor(0)), DEVICES),
    "embedding": (lambda a: torch.nn.functional.embedding(torch.tensor([1]), a), DEVICES),
    "written cpu tensor": (lambda a: torch.ones(4, 5).add_(a), DEVICES),
    "written cpu number": (lambda a: torch.tensor(1.0).add_(a.sum()), DEVICES),
    "cuda indices": (lambda a: torch.ones(4)[a.argmax(0)], DEVICES),
    "put of cpu values": (lambda a: a.index_put_((a[0] > 9,), torch.ones(4)), DEVICES),
    "two devices": (lambda a: a + a.to("cuda:1"), DEVICES),
    "fused Adam with host steps": (
        lambda a: torch._fused_adam_(
            [a], [a], [a], [a], [], [torch.tensor(1.0)],
            lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False,
            maximize=False,
        ),
        DEVICES,
    ),
    "matmul of integers": (lambda a: a.long() @ a.long().T, "not implemented for 'Long'"),
    "int8 matmul of few rows": (
        lambda a: torch._int_mm(INT8[:8].cuda(), INT8.cuda()),
        "greater than 16",
    ),
    "numpy": (lambda a: a.numpy(), "can't convert cuda"),
    "no such device": (lambda a: a.to("cuda:7"), "invalid device ordinal"),
    "generator of the cpu": (
        lambda a: a.normal_(generator=torch.Generator()),
        "device type for generator",
    ),
    "pinning device memory": (lambda a: a.pin_memory(), "cannot pin|can be pinned"),
}  # fmt: skip


@pytest.mark.parametrize("body, message", REFUSED.values(), ids=REFUSED)
def test_what_cuda_refuses_is_refused(body, message):
    with pytest.raises((RuntimeError, TypeError), match=message):
        body(cuda(4, 5))


def test_numbers_and_indices_may_lie_on_the_cpu():
    a = cuda(4, 5)
    assert (a + torch.tensor(1.0)).is_cuda and (torch.tensor(2.0) * a).is_cuda
    assert a[torch.tensor([0, 1])].shape == (2, 5)
    torch.testing.assert_close(torch.where(a > 0, a, torch.tensor(0.0)), a.clamp(min=0))


def test_random_numbers_come_from_the_generator_of_the_device():
    torch.cuda.manual_seed(1)
    first, state = torch.randn(3, device="cuda"), torch.cuda.get_rng_state()
    second = torch.randn(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(second, torch.randn(3, device="cuda"))
    on_cpu = torch.get_rng_state()
    torch.nn.functional.dropout(torch.ones(10, device="cuda"))
    assert torch.equal(on_cpu, torch.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(first, torch.randn(3, device="cuda"))
