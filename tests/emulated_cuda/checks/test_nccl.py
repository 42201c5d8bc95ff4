"""The emulated NCCL: what it computes, and what it does where real NCCL hangs or kills.

Every check starts one interpreter, which forks the ranks: ``python test_nccl.py BODY RANKS FOLDER``
runs ``BODY(Rank)`` on each of them.
"""

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from emulated_cuda.build import CannotBuild, build

ROOT = Path(__file__).resolve().parent.parent
# Short, so that hangs end soon; long enough for four ranks on one core.
TIMEOUT_S = 6.0


# -- starting ranks --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rank:
    rank: int
    size: int
    folder: Path

    def store(self):
        import torch.distributed as dist

        return dist.FileStore(str(self.folder / "store"), self.size)

    def init(self, backend: str = "cpu:gloo,cuda:nccl", timeout_s: float = 60.0, **named):
        """Join the world; the device that is this rank's own."""
        import torch
        import torch.distributed as dist

        torch.cuda.set_device(self.rank)
        dist.init_process_group(
            backend,
            store=self.store(),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout_s),
            **named,
        )
        return torch.device("cuda", self.rank)


@dataclass(frozen=True)
class Ended:
    codes: list[int]  # by rank; negative: the signal
    outputs: list[str]


def run(body, ranks: int, tmp_path: Path, **environment: str) -> Ended:
    """Run ``body`` on ranks of emulated GPUs, whatever way each of them ends."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH_NCCL", "EMULATED_NCCL"))}
    env |= {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{env.get('PYTHONPATH', '')}",
        "EMULATED_CUDA_DEVICES": "4",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **environment,
    }
    env.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        build()
    except CannotBuild as error:
        pytest.skip(str(error))
    command = [sys.executable, __file__, body.__name__, str(ranks), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    codes = [int(code) for code in done.stdout.split()[-ranks:]]
    return Ended(codes, [(tmp_path / f"output-{r}").read_text() for r in range(ranks)])


def passes(body, ranks: int, tmp_path: Path, **environment: str) -> None:
    ended = run(body, ranks, tmp_path, **environment)
    assert ended.codes == [0] * ranks, "\n".join(ended.outputs)


def main(body: str, ranks: int, folder: Path) -> None:
    import torch.distributed as dist  # the ranks inherit what is imported

    assert dist.is_nccl_available()
    pids = [_fork(body, Rank(rank, ranks, folder)) for rank in range(ranks)]
    print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))


def _fork(body: str, rank: Rank) -> int:
    pid = os.fork()
    if pid:
        return pid
    import torch

    torch.set_num_threads(1)
    file = os.open(rank.folder / f"output-{rank.rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 0
    faulthandler.dump_traceback_later(100, exit=True)
    try:
        globals()[body](rank)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def raises(kind: type, *words: str):
    """The block must fail, and say all of ``words``."""
    try:
        yield
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in {error}"
    else:
        raise AssertionError(f"nothing raised {kind.__name__} with {words}")


# -- what it computes ------------------------------------------------------------------------------


def _collectives(rank: Rank) -> None:
    import torch
    import torch.distributed as dist

    device, size, me = rank.init(), rank.size, rank.rank

    def mine(*shape, dtype=torch.float32):
        return torch.full(shape, me + 1, device=device, dtype=dtype)

    total = size * (size + 1) // 2
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
        for n in (0, 1, 5, 300_001):  # of no byte, of less than a round, of several
            x = mine(n, dtype=dtype)
            dist.all_reduce(x)
            assert (x == total).all(), (dtype, n, x)
    for op, expected in (("MAX", size), ("MIN", 1), ("PRODUCT", 24), ("AVG", total / size)):
        x = mine(7)
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        assert (x == expected).all(), (op, x)
    x = torch.tensor([me < 2, False], device=device)
    dist.all_reduce(x)
    assert x.view(torch.uint8).tolist() == [1, 0]  # true is 1, however many say so

    big = torch.arange(400_000.0, device=device)
    x = big.clone() if me == 2 else torch.zeros_like(big)
    dist.broadcast(x, 2)
    assert x.equal(big)
    x = mine(3)
    dist.reduce(x, 1)
    assert (x == (total if me == 1 else me + 1)).all()

    gathered = torch.empty(size, 200_000, device=device)
    dist.all_gather_into_tensor(gathered, mine(200_000))
    assert gathered[:, 0].tolist() == gathered[:, -1].tolist() == [1, 2, 3, 4]
    parts = [torch.empty(2, device=device, dtype=torch.bool) for _ in range(size)]
    dist.all_gather(parts, torch.tensor([me == 1, True], device=device))
    assert [p.tolist() for p in parts] == [[r == 1, True] for r in range(size)]
    whole = torch.arange(4.0 * 200_000, device=device).view(size, -1)
    part = torch.empty(200_000, device=device)
    dist.reduce_scatter_tensor(part, whole * (me + 1))
    assert part.equal(whole[me] * total)
    dist.reduce_scatter(part, list(whole))
    assert part.equal(whole[me] * size)
    flat = torch.cat([mine(2) * 10 + r for r in range(size)])
    dist.all_gather_into_tensor(flat, flat[2 * me : 2 * me + 2])  # in place
    assert flat.tolist() == [v for r in range(size) for v in [(r + 1) * 10 + r] * 2]

    out = torch.empty(size, device=device)
    dist.all_to_all_single(out, torch.arange(4.0, device=device) + 10 * me)
    assert out.tolist() == [10 * r + me for r in range(size)]
    sent = [mine(r + 1) for r in range(size)]
    got = [torch.empty(me + 1, device=device) for _ in range(size)]
    dist.all_to_all(got, sent)
    assert [g.tolist() for g in got] == [[r + 1] * (me + 1) for r in range(size)]
    rows = torch.empty(2 * size, 3, device=device)
    dist.all_to_all_single(rows, mine(2 * size, 3), [2] * size, [2] * size)
    assert rows[:, 0].tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    parts = [torch.empty(2, device=device) for _ in range(size)] if me == 3 else None
    dist.gather(mine(2), parts, dst=3)
    assert me != 3 or [p[0].item() for p in parts] == [1, 2, 3, 4]
    x = torch.empty(2, device=device)
    dist.scatter(x, [mine(2) + r for r in range(size)] if me == 1 else None, src=1)
    assert (x == 2 + me).all()

    _coalesced(device, mine, total, size)
    _groups_and_barriers(rank, device, mine)
    _what_is_refused(rank, device)
    dist.destroy_process_group()


def _coalesced(device, mine, total, size) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch.distributed.distributed_c10d import _coalescing_manager

    xs = [mine(3), mine(2, 2) * 2]
    with _coalescing_manager(device=device, async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    assert (xs[0] == total).all() and (xs[1] == 2 * total).all()
    outs = [torch.empty(size * n, device=device) for n in (2, 3)]
    with _coalescing_manager():
        for out, n in zip(outs, (2, 3), strict=True):
            dist.all_gather_into_tensor(out, mine(n))
    assert outs[1].tolist() == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert functional.all_reduce(mine(2), "sum", dist.group.WORLD).sum().item() == 2 * total
    model = torch.nn.Linear(3, 2, bias=False).to(device)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
    wrapped(mine(1, 3)).sum().backward()
    assert (model.weight.grad == total / size).all()


def _groups_and_barriers(rank: Rank, device, mine) -> None:
    import torch
    import torch.distributed as dist

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3], backend="nccl")]
    own = pairs[rank.rank // 2]
    x = mine(1)
    dist.all_reduce(x, group=own)
    assert x.item() == (3 if rank.rank < 2 else 7)
    dist.barrier()
    dist.barrier(device_ids=[rank.rank])
    gloo = dist.new_group(backend="gloo")
    dist.monitored_barrier(gloo)
    x = mine(2)
    dist.all_reduce(x, group=gloo)  # gloo of a CUDA build takes CUDA tensors
    assert (x == 10).all()
    part = torch.empty(1, device=device)
    with dist.distributed_c10d._coalescing_manager(gloo):
        dist.reduce_scatter_tensor(part, mine(4), group=gloo)
    assert part.item() == 10
    x = torch.ones(2)
    dist.all_reduce(x)
    assert (x == 4).all()


def _what_is_refused(rank: Rank, device) -> None:
    import torch
    import torch.distributed as dist

    nccl = dist.new_group(backend="nccl")
    with raises(RuntimeError, "cpu"):
        dist.all_reduce(torch.ones(2), group=nccl)
    with raises(ValueError, "contiguous"):
        dist.all_reduce(torch.ones(2, 2, device=device)[:, :1])
    with raises(TypeError, "not supported"):
        dist.all_reduce(torch.ones(2, dtype=torch.int16, device=device))
    with raises(ValueError, "BAND"):
        dist.all_reduce(torch.ones(2, dtype=torch.int32, device=device), dist.ReduceOp.BAND)
    with raises(ValueError, "world_size"):
        dist.all_gather_into_tensor(torch.ones(5, device=device), torch.ones(1, device=device))
    assert dist.is_nccl_available() and torch.cuda.nccl.version() >= (2, 20)
    backend = nccl._get_backend(device)
    assert isinstance(backend, dist.ProcessGroupNCCL)
    assert not isinstance(nccl._get_backend(device), dist.ProcessGroupGloo)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 8
    group = dist.new_group(pg_options=options, backend="nccl")
    assert group._get_backend(device).options.config.max_ctas == 8


def test_collectives_give_what_nccl_gives_and_refuse_what_it_refuses(tmp_path):
    passes(_collectives, 4, tmp_path)


# -- from one rank to another ----------------------------------------------------------------------


def _messages(rank: Rank) -> None:
    import emulated_cuda.distributed as emulated
    import torch
    import torch.distributed as dist

    device, store = rank.init(), rank.store()

    def keys():
        return [one.key for one in emulated.communicators()]

    # Alone, a pair gets a communicator of its own, once, whoever calls first.
    x = torch.full((3,), float(rank.rank), device=device)
    if rank.rank == 0:
        for value in (1.0, 2.0):
            dist.send(x + value, 1)
        work = dist.isend(x + 3, 1)
        time.sleep(0.3)
        assert not work.is_completed()  # nobody asked for it yet
        store.set("receive", "now")
        work.wait()
        torch.cuda.synchronize()
        assert work.is_completed() and keys() == ["0:1"]
    elif rank.rank == 1:
        for value in (1.0, 2.0):  # in the order of sending, whatever the tags
            dist.recv(x, 0, tag=7)
            assert (x == value).all()
        store.wait(["receive"])
        dist.recv(x, 0)
        assert (x == 3).all() and keys() == ["0:1"]
    else:
        assert keys() == []

    # Together they go over the group's, for which all ranks come; large ones cross.
    left, right = (rank.rank - 1) % rank.size, (rank.rank + 1) % rank.size
    out, got = (
        torch.full((700_000,), float(rank.rank), device=device),
        torch.empty(700_000, device=device),
    )
    for _ in range(2):
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, out, right), dist.P2POp(dist.irecv, got, left)]
        )
        for work in works:
            work.wait()
        assert (got == left).all()
    assert keys() == (["0"] if rank.rank == 2 else ["0:1", "0"])
    dist.barrier()

    # What does not fit is told, on both sides.
    if rank.rank < 2:
        with raises(dist.DistBackendError, "rank 0", "sends 3 Float", "rank 1 receives 4 Float"):
            if rank.rank == 0:
                dist.send(x, 1)
            else:
                dist.recv(torch.empty(4, device=device), 0)
            torch.cuda.synchronize()
    else:
        dist.destroy_process_group()


def test_messages_go_by_pair_in_order_and_wait_for_their_receiver(tmp_path):
    passes(_messages, 3, tmp_path)


# -- asynchrony ------------------------------------------------------------------------------------


def _asynchrony(rank: Rank) -> None:
    import torch
    import torch.distributed as dist

    device, store = rank.init(), rank.store()
    x = torch.ones(4, device=device)
    dist.broadcast(x, 0)  # the first operation connects, for which the host does wait
    if rank.rank == 0:
        work = dist.all_reduce(x, async_op=True)
        work.wait()  # orders streams, and returns
        assert not work.is_completed()
        late = dist.all_reduce(x, async_op=True)  # so does what comes after
        store.set("go", "1")
    else:
        store.wait(["go"])
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        late = dist.all_reduce(x, async_op=True)
    late.wait()
    assert x.tolist() == [4.0] * 4  # the host waits here, for the bytes
    assert work.is_completed() and work.is_success() and work.exception() is None

    # A result that nobody waited for is a race, also on another stream than the one that waited.
    work = dist.all_reduce(x, async_op=True)
    with raises(RuntimeError, "nccl:all_reduce"):
        x.add_(1)
    work.wait()
    side = torch.cuda.Stream()
    y = torch.ones(4, device=device)
    work = dist.all_reduce(y, async_op=True)
    work.wait()
    with torch.cuda.stream(side), raises(RuntimeError, "nccl:all_reduce"):
        y.add_(1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert y.add(1).tolist() == [3.0] * 4

    # Who drops the tensor and the handle loses nothing; memory stays until the operation is done.
    for _ in range(20):
        dist.all_reduce(torch.full((100_000,), 1.0, device=device), async_op=True)
    torch.cuda.synchronize()
    z = torch.ones(2, device=device)
    future = dist.all_reduce(z, async_op=True).get_future().then(lambda f: f.value()[0] * 10)
    assert future.wait().tolist() == [20.0] * 2
    work = dist.all_reduce(z, async_op=True)
    work.block_current_stream()
    assert z.tolist() == [4.0] * 2
    dist.destroy_process_group()


def test_waiting_orders_streams_and_reading_without_it_is_a_race(tmp_path):
    passes(_asynchrony, 2, tmp_path)


# -- where NCCL hangs ------------------------------------------------------------------------------


def _other_order(rank: Rank) -> None:
    """Two groups of the same ranks, whose collectives the ranks call in different orders."""
    import torch
    import torch.distributed as dist

    device = rank.init()
    groups = [dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)) for _ in range(2)]
    tensors = [torch.ones(4, device=device), torch.ones(8, device=device)]
    for group in groups:  # each connects, in the same order
        dist.all_reduce(torch.ones(1, device=device), group=group)
    torch.cuda.synchronize()
    calls = list(zip(tensors, groups, strict=True))
    if rank.rank == 1:
        calls.reverse()
    asynchronous = os.environ.get("ASYNCHRONOUS") == "1"
    works = [dist.all_reduce(x, group=g, async_op=asynchronous) for x, g in calls]
    if asynchronous:
        for work in works:
            work.wait()
    torch.cuda.synchronize()
    assert [x[0].item() for x in tensors] == [2, 2]


def test_collectives_of_two_groups_in_other_orders_deadlock(tmp_path):
    words = "all_reduce(sum) of 4 Float", "all_reduce(sum) of 8 Float", "rank 1", "rank 0"

    def told(folder: str, **environment: str) -> None:
        (tmp_path / folder).mkdir()
        ended = run(_other_order, 2, tmp_path / folder, **environment)
        assert -signal.SIGABRT in ended.codes, ended
        # Whoever gives up first tells where both wait; the other may find it gone already.
        assert any(all(word in output for word in words) for output in ended.outputs), ended

    told("one-stream")  # both on the caller's stream, so one waits for the other
    told("one-device", ASYNCHRONOUS="1", EMULATED_NCCL_STRICT_ORDER="1")
    (tmp_path / "apart").mkdir()
    passes(_other_order, 2, tmp_path / "apart", ASYNCHRONOUS="1")


def _different_calls(rank: Rank) -> None:
    import torch
    import torch.distributed as dist

    device = rank.init()

    def different(*words):
        return raises(dist.DistBackendError, "different operations", "rank 0", "rank 1", *words)

    def fresh():
        return dist.new_group(backend="nccl")

    first = rank.rank == 0
    with different("all_reduce(sum) of 4 Float", "all_reduce(sum) of 5 Float"):
        dist.all_reduce(torch.ones(4 if first else 5, device=device), group=fresh())
        torch.cuda.synchronize()
    group = fresh()
    with different("broadcast of 4 Float, root 0", "all_reduce(sum) of 4 Float"):
        x = torch.ones(4, device=device)
        dist.broadcast(x, 0, group=group) if first else dist.all_reduce(x, group=group)
        torch.cuda.synchronize()
    with raises(dist.DistBackendError, "different operations"):  # and stays unusable
        dist.barrier(group=group)
    with different("Float", "BFloat16"):
        kind = torch.float32 if first else torch.bfloat16
        dist.all_reduce(torch.ones(4, device=device, dtype=kind), group=fresh())
        torch.cuda.synchronize()
    with different("sum", "max"):
        op = dist.ReduceOp.SUM if first else dist.ReduceOp.MAX
        dist.all_reduce(torch.ones(4, device=device), op, group=fresh())
        torch.cuda.synchronize()
    with raises(dist.DistBackendError, "all_to_all", "sends", "expects"):
        x, rows = torch.ones(4, device=device), [1, 3] if first else [2, 2]
        dist.all_to_all_single(torch.empty(4, device=device), x, [2, 2], rows, group=fresh())
        torch.cuda.synchronize()
    dist.destroy_process_group()


def test_ranks_that_call_different_operations_are_told(tmp_path):
    passes(_different_calls, 2, tmp_path)


# -- a rank that is gone ---------------------------------------------------------------------------


def _dead_peer(rank: Rank) -> None:
    """Rank 1 dies between two collectives; what rank 0 sees of it."""
    import torch
    import torch.distributed as dist

    how = os.environ["HOW"]
    device = rank.init("nccl", timeout_s=TIMEOUT_S)
    x = torch.ones(4, device=device)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    # Read when the group was made: what is set now does not count.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    if rank.rank == 1:
        os._exit(0)
    began = time.monotonic()
    work = dist.all_reduce(x, async_op=True)
    if how == "abort":
        threading.Timer(0.5, dist.group.WORLD.abort).start()
        with raises(dist.DistBackendError, "aborted"):
            work.wait()
            torch.cuda.synchronize()
        assert time.monotonic() - began < TIMEOUT_S
        return
    if how == "blocking":
        with raises(dist.DistBackendError, "timed out in blocking wait", "rank 1 is gone"):
            work.wait()
    elif how == "timeout":
        with raises(dist.DistBackendError, "timed out in blocking wait", "rank 1 is gone"):
            work.wait(timedelta(seconds=1))
        assert time.monotonic() - began < TIMEOUT_S
        return
    else:
        work.wait()
        assert time.monotonic() - began < 0.5 * TIMEOUT_S  # the host runs on
        with raises(dist.DistBackendError, "Watchdog", "rank 1 is gone"):
            torch.cuda.synchronize()
    assert time.monotonic() - began > 0.9 * TIMEOUT_S  # not at once, as gloo does
    with raises(dist.DistBackendError, ""):
        dist.all_reduce(x)


def test_a_rank_that_is_gone_blocks_the_others_until_their_timeout(tmp_path):
    ways = {
        "teardown": {},
        "handled": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
        "blocking": {"TORCH_NCCL_BLOCKING_WAIT": "1"},
        "timeout": {},
        "abort": {},
    }
    ended = {}

    def one(how: str) -> None:
        (tmp_path / how).mkdir()
        ended[how] = run(_dead_peer, 2, tmp_path / how, HOW=how, **ways[how])

    threads = [threading.Thread(target=one, args=(how,)) for how in ways]  # they mostly sleep
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torn = ended.pop("teardown")
    assert torn.codes == [-signal.SIGABRT, 0], torn
    for words in ("Watchdog", "all_reduce(sum) of 4 Float", "rank 1 is gone", "is taken down"):
        assert words in torn.outputs[0], torn.outputs[0]
    for how, end in ended.items():
        assert end.codes == [0, 0], (how, end.outputs)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
