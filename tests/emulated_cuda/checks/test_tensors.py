"""Tensors on the emulated device: the CPU's numbers, CUDA's strictness about devices."""

import io
import threading

import pytest
import torch

EMULATED = {"EMULATED_CUDA_DEVICES": "4"}


def cuda(*shape, **kind):
    return torch.randn(*shape, device="cuda", **kind)


def test_devices_are_found():
    assert torch.cuda.is_available() and torch.cuda.device_count() == 4
    assert "H100" in torch.cuda.get_device_name(0)
    assert torch.cuda.get_device_capability() == (9, 0)
    uuids = {str(torch.cuda.get_device_properties(i).uuid) for i in range(4)}
    assert len(uuids) == 4


def test_matmul_and_its_gradient_equal_the_cpu():
    a, b = cuda(4, 5), cuda(5, 3, requires_grad=True)
    c = a @ b
    assert c.device == torch.device("cuda:0") and c.type() == "torch.cuda.FloatTensor"
    c.square().mean().backward()
    expected = (2 / 12) * (a.cpu().T @ (a.cpu() @ b.detach().cpu()))
    torch.testing.assert_close(b.grad.cpu(), expected)


MIXED = {
    "add": lambda a, b: a + torch.ones(4, 5),
    "matmul": lambda a, b: a @ torch.ones(5, 3),
    "linear": lambda a, b: torch.nn.functional.linear(a, torch.ones(3, 5)),
    "addmm": lambda a, b: torch.addmm(torch.ones(3), a, b),
    "cat": lambda a, b: torch.cat([a, torch.ones(4, 5)]),
    "where": lambda a, b: torch.where(a > 0, a, torch.ones(4, 5)),
    "masked_fill": lambda a, b: a.masked_fill(torch.ones(4, 5, dtype=torch.bool), 0.0),
    "gather": lambda a, b: a.gather(0, torch.zeros(4, 5, dtype=torch.int64)),
    "index_select": lambda a, b: a.index_select(0, torch.tensor([0])),
    "index_select by a number": lambda a, b: a.index_select(0, torch.tensor(0)),
    "embedding": lambda a, b: torch.nn.functional.embedding(torch.tensor([1]), a),
    "written cpu tensor": lambda a, b: torch.ones(3).add_(torch.ones(3, device="cuda")),
    "written cpu number": lambda a, b: torch.tensor(1.0).add_(a.sum()),
    "cpu tensor with cuda indices": lambda a, b: torch.ones(4)[torch.tensor([1], device="cuda")],
    "put of cpu values": lambda a, b: a.index_put_((torch.tensor([0, 1]),), torch.ones(2, 5)),
    "two devices": lambda a, b: a + torch.ones(4, 5, device="cuda:1"),
    "mask elsewhere": lambda a, b: a[torch.ones(4, dtype=torch.bool, device="cuda:1")],
}


@pytest.mark.parametrize("case", MIXED)
def test_operands_of_two_devices_are_refused(case):
    with pytest.raises(RuntimeError, match="same device|either on cpu or on the same device"):
        MIXED[case](cuda(4, 5), cuda(5, 3))


def whole(*shape, kind=torch.int64):
    return torch.ones(*shape, dtype=kind, device="cuda")


REFUSED = {
    "matmul of integers": (lambda: whole(3, 3) @ whole(3, 3), "not implemented for 'Long'"),
    "int8 matmul of few rows": (
        lambda: torch._int_mm(whole(8, 16, kind=torch.int8), whole(16, 8, kind=torch.int8)),
        "greater than 16",
    ),
    "numpy": (lambda: cuda(3).numpy(), "can't convert cuda"),
    "no such device": (lambda: torch.empty(3, device="cuda:7"), "invalid device ordinal"),
    "generator of the cpu": (
        lambda: torch.normal(0.0, 1.0, (3,), device="cuda", generator=torch.Generator()),
        "device type for generator",
    ),
    "pinning device memory": (lambda: cuda(3).pin_memory(), "cannot pin|can be pinned"),
    "pinned and on the device": (
        lambda: torch.empty(3, device="cuda", pin_memory=True),
        "can be pinned",
    ),
    "fused Adam with host steps": (
        lambda: torch._fused_adam_(
            [cuda(3)], [cuda(3)], [cuda(3)], [cuda(3)], [], [torch.tensor(1.0)],
            lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False,
            maximize=False,
        ),
        "same device",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cuda_refuses_is_refused(case):
    body, message = REFUSED[case]
    with pytest.raises((RuntimeError, TypeError), match=message):
        body()


def test_numbers_and_indices_may_lie_on_the_cpu():
    a = cuda(4, 5)
    assert (a + torch.tensor(1.0)).is_cuda and (torch.tensor(2.0) * a).is_cuda
    assert a[torch.tensor([0, 1])].shape == (2, 5)
    torch.testing.assert_close(torch.where(a > 0, a, torch.tensor(0.0)), a.clamp(min=0))


@pytest.mark.parametrize("kind", [{"foreach": True}, {"fused": True}, {}])
def test_training_equals_the_cpu(kind):
    def net():
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16)
        return torch.nn.Sequential(*layers, torch.nn.Linear(16, 4))

    ours, reference = net().cuda(), net()
    x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
    optimizers = [
        torch.optim.AdamW(ours.parameters(), lr=1e-2, **kind),
        torch.optim.AdamW(reference.parameters(), lr=1e-2, foreach=False),
    ]
    for _ in range(5):
        for model, optimizer, to in zip(
            (ours, reference), optimizers, ("cuda", "cpu"), strict=True
        ):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x.to(to)), y.to(to)).backward()
            optimizer.step()
    for p, q in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.cpu(), q, atol=1e-6, rtol=0)


def test_backward_runs_in_a_thread_of_the_device():
    seen = {}

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.update(thread=threading.get_ident(), device=torch.cuda.current_device())
            return gradient * 2

    x = torch.ones(3, device="cuda:1", requires_grad=True)
    Double.apply(x).sum().backward()
    assert seen["device"] == 1 and seen["thread"] != threading.get_ident()
    assert x.grad.tolist() == [2, 2, 2]


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


def test_saving_and_loading_keep_the_device():
    file, a = io.BytesIO(), torch.randn(3, device="cuda:1")
    torch.save(a, file)
    file.seek(0)
    assert torch.load(file).device == torch.device("cuda:1")
    file.seek(0)
    assert torch.load(file, map_location="cpu").device.type == "cpu"


def test_views_results_and_outputs_share_memory_as_on_a_gpu():
    a = cuda(4, 5)
    a.t()[0].zero_()
    assert a[:, 0].sum().item() == 0
    out = torch.empty(0, device="cuda")
    torch.add(a, 1, out=out)
    assert torch.equal(out, a + 1)
    a[1:].copy_(a[:-1].clone())
    assert a.sort().values.shape == (4, 5) and a.topk(2).indices.is_cuda
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (a @ a.t()).dtype == torch.bfloat16
