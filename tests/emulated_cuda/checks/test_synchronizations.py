"""Every operation that makes the host wait for the device is counted, by operator."""

import emulated_cuda
import pytest
import torch


def indices(*values: int) -> torch.Tensor:
    return torch.tensor(values).pin_memory().to("cuda", non_blocking=True)


WAITS = {
    "item": (lambda x: x.sum().item(), "aten::_local_scalar_dense"),
    "if": (lambda x: bool((x > 1).any()), "aten::_local_scalar_dense"),
    "nonzero": (lambda x: x.nonzero(), "aten::nonzero"),
    "unique": (lambda x: x.unique(), "aten::_unique2"),
    "masked_select": (lambda x: x.masked_select(x > 1), "aten::masked_select"),
    "mask": (lambda x: x[x > 1], "aten::nonzero"),
    "equal": (lambda x: torch.equal(x, x.clone()), "aten::equal"),
    "host indices": (lambda x: x[torch.tensor([1])], "aten::copy_ to the device"),
    "repeat_interleave": (lambda x: x.repeat_interleave(x.long()), "aten::repeat_interleave"),
    "multinomial": (lambda x: x.multinomial(1), "aten::multinomial"),
    "tolist": (lambda x: x.tolist(), "aten::copy_ from the device"),
    "upload": (lambda x: x.copy_(torch.ones(6)), "aten::copy_ to the device"),
    "device": (lambda x: torch.cuda.synchronize(), "torch.cuda.synchronize"),
    "stream": (lambda x: torch.cuda.current_stream().synchronize(), "Stream.synchronize"),
    "event": (
        lambda x: torch.cuda.current_stream().record_event().synchronize(),
        "Event.synchronize",
    ),
    # These do not:
    "arithmetic": (lambda x: (x * 2 + 1).softmax(0).sum(), None),
    "put a number by mask": (lambda x: x.clone().__setitem__(x > 1, 0.0), None),
    "gather": (lambda x: x[indices(1, 2)], None),
    "known length": (lambda x: x.repeat_interleave(x.long(), output_size=15), None),
    "backward": (lambda x: x.requires_grad_().square().sum().backward(), None),
    "query": (lambda x: torch.cuda.current_stream().query(), None),
}


@pytest.mark.parametrize("body, operator", WAITS.values(), ids=WAITS)
def test_each_wait_of_the_host_is_counted_by_its_operator(body, operator):
    x = torch.arange(6.0, device="cuda")
    torch.cuda.synchronize()
    emulated_cuda.reset_synchronizations()
    body(x)
    assert emulated_cuda.synchronizations() == ({operator: 1} if operator else {})
