"""Device memory that two processes share by CUDA IPC handles."""

import pytest
import torch
import torch.multiprocessing as mp

EMULATED = {"EMULATED_CUDA_DEVICES": "2"}


def add_one(index, handle) -> None:
    x = torch.UntypedStorage._new_shared_cuda(*handle)
    torch.empty(0, device=f"cuda:{index}").set_(x, 0, (4,)).add_(1)
    torch.cuda.synchronize()


def test_another_process_writes_into_shared_memory():
    x = torch.arange(4.0, device="cuda:1")
    before = torch.cuda.memory_allocated(1)
    handle = x.untyped_storage()._share_cuda_()
    assert torch.cuda.memory_allocated(1) == before
    process = mp.get_context("spawn").Process(target=add_one, args=(1, handle))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert x.tolist() == [1, 2, 3, 4]


def send(queue, done) -> None:
    x = torch.full((3,), 5.0, device="cuda")
    queue.put(x)
    done.wait(60)


def test_a_queue_carries_tensors():
    context = mp.get_context("spawn")
    queue, done = context.Queue(), context.Event()
    process = context.Process(target=send, args=(queue, done))
    process.start()
    x = queue.get(timeout=60)
    assert x.is_cuda and x.tolist() == [5, 5, 5]
    del x
    done.set()
    process.join(60)
    assert process.exitcode == 0


def test_a_handle_does_not_open_where_it_was_made():
    handle = torch.ones(4, device="cuda").untyped_storage()._share_cuda_()
    with pytest.raises(RuntimeError, match="invalid device context"):
        torch.UntypedStorage._new_shared_cuda(*handle)
