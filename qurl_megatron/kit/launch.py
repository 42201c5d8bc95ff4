"""Start one process per rank on this machine, pass signals on, and end together.

The launcher sees all ranks, so it also names the cause of a run's end. Under torchrun or srun
the ranks find their place themselves (``place``), and the first to fail says why.
"""

import contextlib
import glob
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

from qurl_megatron.kit.undertaker import bury

GRACE_S = 15.0
"""Seconds the other ranks get to end by themselves after one has failed."""
LOST_S = 2.0
"""The same after one was killed: they can save nothing without it."""
SURE_S = 0.5
"""Seconds by which a rank's death may be seen after the death of another that noticed it."""
LEAVING_S = 0.2
"""Seconds that a rank which has failed may take to be gone, after its peers have noticed."""
TEXT = 15_000
"""Characters, of up to 4 bytes, that a rank may tell: they wait in a pipe until it has ended."""
NO_CODE = 255
"""Exit code that multiprocessing reports for a process whose fork server is gone."""

FORK_SERVER = "qurl_megatron.kit.fork_server"
PRELOAD = ["qurl_megatron.training.train"]
"""Imported once by the fork server: Megatron takes seconds to import, a fork of it none."""


def launch(
    target: Callable[..., int], args: tuple, world_size: int, *, lost: Callable[[str], str] = str
) -> int:
    """Run ``target(*args)`` on ``world_size`` ranks and return the exit code of the run.

    Ranks live in process groups of their own, so that Ctrl-C reaches them once, through this
    process, and end with this process, however it ends. The first rank that fails ends the others;
    its sentence (``tell``) is printed, and its code returned. A rank that is killed by signal n
    goes before all: the run ends with 128 + n.

    Args:
        lost: makes the user's message of "rank 1 was killed by SIGKILL".
    """
    # Megatron warns of every optional package it does not find; `qurl show --env` says it once.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    # CUDA must not be touched before a fork, and importing Megatron may touch it: spawn there.
    context: SpawnContext | ForkServerContext
    if glob.glob("/dev/nvidia[0-9]*"):
        context = multiprocessing.get_context("spawn")
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([FORK_SERVER, *PRELOAD])
    # Every rank would take all cores for itself.
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // world_size)))
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    # Where the ranks meet. torch itself would listen on all addresses, for other users of the
    # network to change keys; and the launcher need not import it.
    listener = socket.create_server(("127.0.0.1", 0))
    ranks: list = []
    for number, (_, writer) in enumerate(pipes):
        keeps = listener if number == 0 else None
        arguments = (target, args, number, world_size, listener.getsockname(), writer, keeps)
        ranks.append(context.Process(target=_run, args=arguments, name=f"rank {number}"))
    for process, (_, writer) in zip(ranks, pipes, strict=True):
        process.start()
        writer.close()  # only the rank keeps its end
    listener.close()
    with _forwarded(ranks) as forwarded:
        return _join(ranks, [reader for reader, _ in pipes], forwarded, lost)


def _run(
    target: Callable[..., int],
    args: tuple,
    rank: int,
    world_size: int,
    at: tuple[str, int],
    launcher: Connection,
    listener: socket.socket | None,
) -> None:
    """Be a rank.

    Args:
        at: host and port where the ranks meet.
        launcher: for ``tell``.
        listener: given to rank 0, which keeps the store.
    """
    global _launcher
    _launcher = launcher
    os.setpgrp()
    bury(os.getpid())
    # Variables of a launcher further out are not meant for these ranks.
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    # All ranks are on this machine; without it gloo looks the host's name up, which may fail.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR=at[0],
        MASTER_PORT=str(at[1]),
        TORCHELASTIC_USE_AGENT_STORE="True",  # torch need not open a store
    )
    store = None  # for the ranks to meet; it lasts as long as somebody holds it
    if listener is not None:
        from torch.distributed import TCPStore

        file = listener.detach()
        store = TCPStore(*at, is_master=True, wait_for_workers=False, master_listen_fd=file)
    code = target(*args)
    del store
    sys.exit(code)


_launcher: Connection | None = None
"""Where a rank tells the process that launched it why it fails; None under torchrun and srun."""


def tell(text: str) -> None:
    """Say on stderr why this rank fails, unless another has: ranks often meet the same mistake.

    Under ``launch`` the launcher prints it, for it alone knows whether a rank was killed.
    """
    if _launcher is not None:
        with contextlib.suppress(BrokenPipeError):  # it is gone, and so is this rank in a moment
            _launcher.send((time.monotonic(), text[-TEXT:]))
    elif _first_to_fail():
        print(text, file=sys.stderr)


def _first_to_fail() -> bool:
    """Return True on the first rank to ask at the rendezvous store."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return os.environ.get("RANK", "0") == "0"
    time.sleep(LEAVING_S)
    try:
        # Rank 0 may host the store: where both are gone, it has told. torch would fail, too, but
        # print the frames of its C++.
        at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection(at, timeout=GRACE_S).close()
        return dist.distributed_c10d._get_default_store().add("qurl/failed", 1) == 1
    except (OSError, dist.DistError):
        return False


def _join(
    ranks: list, readers: list[Connection], forwarded: set[int], lost: Callable[[str], str]
) -> int:
    """Wait for all ranks; after a first failure say why, and end those that do not end."""
    codes: dict[int, int] = {}
    _wait(ranks, codes, None)
    if not any(codes.values()):
        return 0
    # By then it is clear whether a rank was killed, or only reported the failure.
    _wait(ranks, codes, SURE_S)
    killed = [rank for rank, code in codes.items() if code < 0 or code == NO_CODE]
    (text, teller), patience_s = _first(readers), GRACE_S
    if text and all(codes[rank] == -signal.SIGABRT for rank in killed):
        killed = []  # by NCCL, for they waited for one that failed and told why
    if killed:
        text, patience_s = None, LOST_S
        if -codes[killed[0]] not in forwarded:
            text = f"qurl: {lost(_death(killed[0], codes[killed[0]]))}"
    if text is not None:
        print(text.rstrip(), file=sys.stderr, flush=True)
    _wait(ranks, codes, patience_s)
    for rank in ranks:
        rank.kill()
        rank.join()
    # Ranks that failed because a peer is gone may have ended first.
    failed = sorted(filter(codes.get, codes), key=lambda rank: (rank != teller, codes[rank] < 0))
    first = codes[[*killed, *failed][0]]
    if first < 0:
        return 128 - first
    return first


def _wait(ranks: list, codes: dict[int, int], seconds: float | None) -> None:
    """Add exit codes to ``codes`` until all ranks have ended, for so many seconds; None waits until
    the first failure."""
    end = None if seconds is None else time.monotonic() + seconds
    while len(codes) < len(ranks) and not (end is None and any(codes.values())):
        running: dict[Any, int] = {
            rank.sentinel: i for i, rank in enumerate(ranks) if i not in codes
        }
        ended = wait(list(running), None if end is None else max(0.0, end - time.monotonic()))
        if not ended:
            return
        for index in (running[sentinel] for sentinel in ended):
            ranks[index].join()
            codes[index] = ranks[index].exitcode


def _first(readers: list[Connection]) -> tuple[str | None, int | None]:
    """Return the earliest sentence of a rank, and the rank; (None, None) if all are silent."""
    failures = []
    for rank, reader in enumerate(readers):
        with contextlib.suppress(EOFError):  # it ended without a word
            if reader.poll():
                failures.append((*reader.recv(), rank))
    return min(failures, default=(0.0, None, None))[1:]


def _death(rank: int, code: int) -> str:
    if code == NO_CODE:
        return f"rank {rank} was lost, for the process that forked it was killed"
    return f"rank {rank} was killed by {signal.Signals(-code).name}"


def stopping() -> list[int]:
    """Return the signals that stop a run; SIGHUP (a closed session) unless ``nohup`` ignores it."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return [signal.SIGINT, signal.SIGTERM]
    return [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@contextlib.contextmanager
def _forwarded(ranks: list) -> Iterator[set[int]]:
    """Inside, pass signals that stop a run on to the ranks; yield the set of those passed on."""
    passed: set[int] = set()

    def forward(number: int, _frame) -> None:
        passed.add(number)
        for rank in ranks:
            if rank.is_alive():
                os.kill(rank.pid, number)

    before = {number: signal.signal(number, forward) for number in stopping()}
    try:
        yield passed
    finally:
        if not passed:  # batch systems repeat themselves, and the exit code is still to be said
            for number, handler in before.items():
                signal.signal(number, handler)
