"""The emulated NCCL: what it computes, and what it does where real NCCL refuses, hangs or kills.

Small sums of every kind are compared by ``pytest -k nccl tests/distributed``.
"""

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.ranks import run_on_ranks

# Short, so that hangs end soon; long enough for the ranks to meet on one core.
TIMEOUT = timedelta(seconds=6)


def on_ranks(body, count: int, tmp_path: Path, *args) -> None:
    run_on_ranks(body, count, "nccl", tmp_path, *args, preload=("torch.distributed",))


def numbers(device, *shape, dtype=torch.float32):
    """Filled with 1 on the first rank, with 2 on the second."""
    return torch.full(shape, dist.get_rank() + 1, device=device, dtype=dtype)


def collectives(device) -> None:
    size, me = dist.get_world_size(), dist.get_rank()
    total = size * (size + 1) // 2
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for n in (0, 1, 300_001):  # of no byte, of less than a round, of several
            x = numbers(device, n, dtype=dtype)
            dist.all_reduce(x)
            assert (x == total).all(), (dtype, n, x)
    for op, expected in (("MAX", size), ("MIN", 1), ("AVG", total / size)):
        x = numbers(device, 7)
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        assert (x == expected).all(), (op, x)
    x = torch.tensor([me < 2, False], device=device)
    dist.all_reduce(x)
    assert x.view(torch.uint8).tolist() == [1, 0]  # true is 1, however many say so

    whole = torch.arange(size * 200_000.0, device=device).view(size, -1)
    x = whole.clone() if me == 2 else torch.zeros_like(whole)
    dist.broadcast(x, 2)
    assert x.equal(whole)
    part = torch.empty(200_000, device=device)
    dist.reduce_scatter_tensor(part, whole * (me + 1))
    assert part.equal(whole[me] * total)
    x[me] *= me
    dist.all_gather_into_tensor(x, x[me])  # in place
    assert x.equal(whole * torch.arange(size, device=device)[:, None])
    rows = torch.empty(size * (me + 1), device=device)
    counts = list(range(1, size + 1))
    dist.all_to_all_single(rows, numbers(device, total), [me + 1] * size, counts)
    assert rows.view(size, -1)[:, 0].tolist() == counts
    outs = [torch.empty(size * n, device=device) for n in (2, 3)]
    with dist.distributed_c10d._coalescing_manager():
        for out, n in zip(outs, (2, 3), strict=True):
            dist.all_gather_into_tensor(out, numbers(device, n))
    assert outs[1].tolist() == [r + 1 for r in range(size) for _ in range(3)]

    own = [dist.new_group([0, 1]), dist.new_group([2, 3])][me // 2]
    x = numbers(device, 1)
    dist.all_reduce(x, group=own)
    assert x.item() == (3 if me < 2 else 7)
    dist.barrier()


def test_collectives_give_what_nccl_gives(tmp_path):
    on_ranks(collectives, 4, tmp_path)


def messages(device) -> None:
    from emulated_cuda.distributed import communicators

    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()

    # Alone, a pair gets a communicator of its own, once, whoever calls first.
    x = numbers(device, 3)
    if rank == 0:
        dist.send(x, 1)
        work = dist.isend(x * 2, 1)
        assert not work.is_completed()  # nobody asked for it yet
        store.set("receive", "now")
        work.wait()
        torch.cuda.synchronize()
        assert work.is_completed()
    elif rank == 1:
        for value in (1, 2):  # in the order of sending, whatever the tags
            dist.recv(x, 0, tag=7)
            assert (x == value).all()
            store.wait(["receive"])
    assert communicators() == (["0:1"] if rank < 2 else [])

    # Together they go over the group's, for which all ranks come; large ones cross.
    left, right = (rank - 1) % size, (rank + 1) % size
    out, got = numbers(device, 700_000), torch.empty(700_000, device=device)
    sends, receives = dist.P2POp(dist.isend, out, right), dist.P2POp(dist.irecv, got, left)
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()
    assert (got == left + 1).all()
    assert communicators() == (["0:1", "0"] if rank < 2 else ["0"])


def test_messages_go_by_pair_in_order_and_wait_for_their_receiver(tmp_path):
    on_ranks(messages, 3, tmp_path)


def asynchrony(device) -> None:
    store = dist.distributed_c10d._get_default_store()
    x = torch.ones(4, device=device)
    dist.broadcast(x, 0)  # the first operation connects, for which the host does wait
    if dist.get_rank() == 1:
        store.wait(["go"])
    work = dist.all_reduce(x, async_op=True)
    work.wait()  # orders streams, and returns
    if dist.get_rank() == 0:
        assert not work.is_completed()
        store.set("go", "1")
    assert x.tolist() == [2.0] * 4  # the host waits here, for the bytes
    assert work.is_completed()

    # A result that nobody waited for is a race, also on another stream than the one that waited.
    work = dist.all_reduce(x, async_op=True)
    with pytest.raises(RuntimeError, match="nccl:all_reduce"):
        x.add_(1)
    work.wait()
    y, side = torch.ones(4, device=device), torch.cuda.Stream()
    dist.all_reduce(y, async_op=True).wait()
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match="nccl:all_reduce"):
        y.add_(1)

    # Who drops the tensor and the handle loses nothing; memory stays until the operation is done.
    for _ in range(20):
        dist.all_reduce(torch.full((100_000,), 1.0, device=device), async_op=True)
    torch.cuda.synchronize()


def test_waiting_orders_streams_and_reading_without_it_is_a_race(tmp_path):
    on_ranks(asynchrony, 2, tmp_path)


def refusals(device) -> None:
    nccl = dist.new_group(backend="nccl")
    ones = torch.ones(4, device=device)
    for error, words, call in (
        (RuntimeError, "cpu", lambda: dist.all_reduce(torch.ones(2), group=nccl)),
        (ValueError, "contiguous", lambda: dist.all_reduce(ones.view(2, 2)[:, :1])),
        (TypeError, "not supported", lambda: dist.all_reduce(ones.to(torch.int16))),
        (ValueError, "BAND", lambda: dist.all_reduce(ones.int(), dist.ReduceOp.BAND)),
        (ValueError, "world_size", lambda: dist.all_gather_into_tensor(ones, ones)),
    ):
        with pytest.raises(error, match=words):
            call()


def test_what_nccl_refuses_is_refused(tmp_path):
    on_ranks(refusals, 2, tmp_path)


def different_calls(device) -> None:
    first, ones = dist.get_rank() == 0, torch.ones(4, device=device)
    total, largest = dist.ReduceOp.SUM, dist.ReduceOp.MAX
    for words, call in (
        (
            ["of 4 Float", "of 5 Float"],
            lambda group: dist.all_reduce(ones.new_ones(4 if first else 5), group=group),
        ),
        (
            ["broadcast of 4 Float, root 0", "all_reduce(sum) of 4 Float"],
            lambda group: (
                dist.broadcast(ones, 0, group=group)
                if first
                else dist.all_reduce(ones, group=group)
            ),
        ),
        (
            ["Float", "BFloat16"],
            lambda group: dist.all_reduce(ones if first else ones.bfloat16(), group=group),
        ),
        (
            ["sum", "max"],
            lambda group: dist.all_reduce(ones, total if first else largest, group=group),
        ),
    ):
        group = dist.new_group(backend="nccl")
        with pytest.raises(dist.DistBackendError) as told:
            call(group)
            torch.cuda.synchronize()
        for word in ("different operations", "rank 0", "rank 1", *words):
            assert word in str(told.value)
        with pytest.raises(dist.DistBackendError, match="different operations"):
            dist.barrier(group=group)  # and stays unusable
    with pytest.raises(dist.DistBackendError, match="rank 0.* sends 3 Float"):
        if first:
            dist.send(ones[:3], 1)
        else:
            dist.recv(ones, 0)
        torch.cuda.synchronize()


def test_ranks_that_call_different_operations_are_told(tmp_path):
    on_ranks(different_calls, 2, tmp_path)


def taken_down(body, tmp_path: Path) -> str:
    """Run ``body`` until its group's timeout ends a process; what its ranks print."""
    with pytest.raises(mp.ProcessExitedException) as told:
        on_ranks(body, 2, tmp_path, tmp_path)
    assert told.value.signal_name == signal.SIGABRT.name
    return "\n".join(path.read_text() for path in tmp_path.glob("told-*"))


def print_into(folder: Path) -> None:
    file = os.open(folder / f"told-{dist.get_rank()}", os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 2)


def other_order(device, folder: Path) -> None:
    """Two groups of the same ranks, whose collectives the ranks call in different orders."""
    print_into(folder)
    groups = [dist.new_group(timeout=TIMEOUT) for _ in range(2)]
    for group in groups:  # each connects, in the same order
        dist.all_reduce(torch.ones(1, device=device), group=group)
    calls = [(torch.ones(4, device=device), groups[0]), (torch.ones(8, device=device), groups[1])]
    if dist.get_rank() == 1:
        calls.reverse()
    for x, group in calls:
        dist.all_reduce(x, group=group)
    torch.cuda.synchronize()


def test_collectives_of_two_groups_in_other_orders_deadlock(tmp_path):
    told = taken_down(other_order, tmp_path)
    for words in ("all_reduce(sum) of 4 Float", "all_reduce(sum) of 8 Float", "rank 1", "rank 0"):
        assert words in told


def dead_peer(device, folder: Path) -> None:
    """Rank 1 dies between two collectives; rank 0 waits for it."""
    print_into(folder)
    group = dist.new_group(timeout=TIMEOUT)
    x = torch.ones(4, device=device)
    dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        os._exit(0)
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    assert not work.is_completed()  # the host runs on, and nothing fails at once, as over gloo
    torch.cuda.synchronize()


def test_a_rank_that_is_gone_blocks_the_others_until_their_timeout(tmp_path):
    told = taken_down(dead_peer, tmp_path)
    for words in ("Watchdog", "all_reduce(sum) of 4 Float", "rank 1 is gone", "is taken down"):
        assert words in told
