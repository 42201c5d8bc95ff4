"""Every operation that makes the host wait for the device is counted, by operator."""

import warnings

import emulated_cuda
import pytest
import torch

EMULATED = {"EMULATED_CUDA_POISON": "0"}


def counted(body) -> dict[str, int]:
    emulated_cuda.reset_synchronizations()
    body()
    return emulated_cuda.synchronizations()


X = None


@pytest.fixture(autouse=True)
def tensors():
    global X
    X = torch.arange(6.0, device="cuda")
    torch.cuda.synchronize()


WAITS = {
    "item": (lambda: X.sum().item(), "aten::_local_scalar_dense"),
    "float": (lambda: float(X[0]), "aten::_local_scalar_dense"),
    "if": (lambda: bool((X > 1).any()), "aten::_local_scalar_dense"),
    "nonzero": (lambda: X.nonzero(), "aten::nonzero"),
    "unique": (lambda: X.unique(), "aten::_unique2"),
    "masked_select": (lambda: X.masked_select(X > 1), "aten::masked_select"),
    "mask": (lambda: X[X > 1], "aten::nonzero"),
    "put by mask": (
        lambda: X.clone().__setitem__(X > 4, torch.ones(1, device="cuda")),
        "aten::nonzero",
    ),
    "equal": (lambda: torch.equal(X, X.clone()), "aten::equal"),
    "host indices": (lambda: X[torch.tensor([1])], "aten::copy_ to the device"),
    "repeat_interleave": (
        lambda: X.repeat_interleave(torch.ones(6, dtype=torch.int64, device="cuda")),
        "aten::repeat_interleave",
    ),
    "multinomial": (lambda: X.multinomial(1), "aten::multinomial"),
    "cpu": (lambda: X.cpu(), "aten::copy_ from the device"),
    "tolist": (lambda: X.tolist(), "aten::copy_ from the device"),
    "upload": (lambda: X.copy_(torch.ones(6)), "aten::copy_ to the device"),
    "tensor": (lambda: torch.tensor([1.0], device="cuda"), "aten::copy_ to the device"),
    "device": (lambda: torch.cuda.synchronize(), "torch.cuda.synchronize"),
    "stream": (lambda: torch.cuda.current_stream().synchronize(), "Stream.synchronize"),
    "event": (
        lambda: torch.cuda.current_stream().record_event().synchronize(),
        "Event.synchronize",
    ),
}


@pytest.mark.parametrize("case", WAITS)
def test_the_host_waits(case):
    body, name = WAITS[case]
    assert counted(body) == {name: 1}


QUIET = {
    "arithmetic": lambda: (X * 2 + 1).softmax(0).sum(),
    "fill by mask": lambda: X.clone().masked_fill_(X > 1, 0.0),
    "put a number by mask": lambda: X.clone().__setitem__(X > 1, 0.0),
    "gather": lambda: X[torch.ones(2, dtype=torch.int64, device="cuda")],
    "known length": lambda: X.repeat_interleave(
        torch.ones(6, dtype=torch.int64, device="cuda"), output_size=6
    ),
    "pinned upload": lambda: X.copy_(torch.ones(6).pin_memory(), non_blocking=True),
    "backward": lambda: torch.ones(3, device="cuda", requires_grad=True).square().sum().backward(),
    "query": lambda: torch.cuda.current_stream().query(),
    "fresh": lambda: torch.zeros(3, device="cuda") + torch.full((3,), 2.0, device="cuda"),
}


@pytest.mark.parametrize("case", QUIET)
def test_the_host_does_not_wait(case):
    assert counted(QUIET[case]) == {}


def test_sync_debug_mode_warns_and_refuses():
    try:
        torch.cuda.set_sync_debug_mode("error")
        for body in (lambda: X.sum().item(), lambda: X.cpu(), lambda: X.nonzero()):
            with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
                body()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            X[X > 1]
        assert any("synchronizing CUDA operation" in str(one.message) for one in seen)
    finally:
        torch.cuda.set_sync_debug_mode(0)
    assert X[0].item() == 0
