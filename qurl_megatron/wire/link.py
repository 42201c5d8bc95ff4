"""One process group between all training ranks (first) and the ranks of one engine (after them).

gloo connects every pair when the group is made. NCCL would make a communicator for each pair that
sends, at its first message, and block indefinitely on the peer meanwhile. So the group's one
communicator is made here, at once, it serves all pairs, and an empty greeting from every training
rank to every engine rank opens what NCCL opens late; all of it under a deadline.

Every wait on a link ends, and a link that failed is aborted, so that no kernel keeps waiting on the
GPU. A failure of one link leaves the others alone.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.kit.network import own_address
from qurl_megatron.wire.meeting import POLL_S, LinkError

GREETING = 2**30  # tag; far above the number of any bucket
ABORT_S = 30.0
GRACE_S = 0.1


@dataclass
class Link:
    """The way between the trainer and one engine, as one end has it."""

    id: str
    group: Any  # a ProcessGroupGloo or NCCL, whose methods torch's types leave out
    device: torch.device
    moved: list[int]  # messages begun (sender) or come (receiver), by rank of the other side
    sending: dict[int, list[dist.Work]] = field(default_factory=dict)  # by bucket
    deadline: dict[int, float] = field(default_factory=dict)

    def send(self, messages: Sequence[tuple[int, Tensor]], tag: int) -> list[dist.Work]:
        """Begin to send to the given ranks of the group, to all of them at once.

        Raises:
            RuntimeError: the link is broken.
        """
        if not messages:
            return []
        if self.device.type == "cpu":
            return [self.group.send([memory], rank, tag) for rank, memory in messages]
        return self._at_once(self.group.send, messages, tag)

    def receive(self, messages: Sequence[tuple[int, Tensor]], tag: int, deadline: float) -> None:
        """
        Raises:
            RuntimeError: it is broken, or nothing came in time.
        """
        if self.device.type == "cpu":
            works = [self.group.recv([memory], rank, tag) for rank, memory in messages]
        else:
            works = self._at_once(self.group.recv, messages, tag)
        for work in works:
            self.finish(work, deadline)

    def _at_once(
        self, move: Callable, messages: Sequence[tuple[int, Tensor]], tag: int
    ) -> list[dist.Work]:
        """One after another they would wait for each other: a communicator has one stream."""
        self.group._start_coalescing()
        try:
            for rank, memory in messages:
                move([memory], rank, tag)
        finally:  # a group of calls left open would swallow this thread's next collective
            work = self.group._end_coalescing()
        return [work]

    def finish(self, work: dist.Work, deadline: float) -> None:
        """Wait until bytes are sent or here.

        Raises:
            RuntimeError: the peer is gone, or the deadline is past.
        """
        left_s = max(deadline - time.monotonic(), 0.001)  # gloo takes 0 for "forever"
        if self.device.type == "cpu":
            work.wait(timedelta(seconds=left_s))
            return
        # NCCL's own wait only makes the stream wait. What arrived while nobody looked is not late.
        deadline = max(deadline, time.monotonic() + GRACE_S)
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise LinkError("timed out")
            time.sleep(POLL_S)
        work.wait()

    def abort(self) -> None:
        """Nothing moves on it any more; what waits for it fails."""
        self.sending.clear()
        if self.device.type == "cpu":
            self.group.abort()
            return
        try:
            within(ABORT_S, self.group.abort)
        except LinkError:  # NCCL hangs in the abort: leave it to the thread and carry on
            return


def open_link(
    about: Mapping[str, Any],
    store: dist.Store,
    link: str,
    *,
    rank: int,
    tp: int,
    device: torch.device,
) -> Link:
    """Join the new link; every end calls it, with its rank in the group.

    Args:
        about: ``GroupSender.describe``.
        link: its id, the same for all, and never used before.

    Raises:
        RuntimeError: not all came in time, or they cannot reach each other.
    """
    senders, wait_s = about["senders"], about["connect_timeout_s"]
    deadline = time.monotonic() + wait_s
    prefixed = dist.PrefixStore(f"link/{link}", store)
    group: dist.ProcessGroupGloo | dist.ProcessGroupNCCL
    if device.type == "cpu":
        group = _gloo_group(about, prefixed, rank, senders + tp)
    else:
        group = _nccl_group(prefixed, rank, senders + tp)
    sends = rank < senders
    new_link = Link(link, group, device, [0] * (tp if sends else senders))

    def join() -> None:
        if device.type != "cpu":
            group.eager_connect_single_device(device)
        _greet(new_link, sends=sends, senders=senders, tp=tp, deadline=deadline)

    try:
        within(deadline - time.monotonic(), join, late=new_link.abort)
    except RuntimeError:
        new_link.abort()
        raise
    return new_link


def within(seconds: float, act: Callable[[], Any], late: Callable[[], Any] | None = None) -> Any:
    """Run ``act`` in a thread and return its result: calls into NCCL take no deadline and cannot be
    stopped.

    Args:
        late: called there, where ``act`` comes back after all when nobody waits for it any more.

    Raises:
        LinkError: it took longer. The thread stays until ``act`` returns.
    """
    done: Future = Future()
    given_up = threading.Event()

    def run() -> None:
        try:
            outcome = act()
        except BaseException as error:  # the caller's
            done.set_exception(error)
        else:
            done.set_result(outcome)
        if given_up.is_set() and late is not None:
            late()

    thread = threading.Thread(target=run, name="link", daemon=True)
    thread.start()
    thread.join(max(seconds, 0.0))
    if thread.is_alive():
        given_up.set()
        raise LinkError(f"not done within {seconds:.1f} s")
    return done.result()


def _greet(link: Link, *, sends: bool, senders: int, tp: int, deadline: float) -> None:
    """One byte from every training rank to every engine rank."""
    peers = range(senders, senders + tp) if sends else range(senders)
    memory = torch.zeros(len(peers), dtype=torch.uint8, device=link.device)
    messages = [(rank, memory[i : i + 1]) for i, rank in enumerate(peers)]
    if not sends:
        link.receive(messages, GREETING, deadline)
        return
    for work in link.send(messages, GREETING):
        link.finish(work, deadline)


def _gloo_group(
    about: Mapping[str, Any], store: dist.Store, rank: int, size: int
) -> "dist.ProcessGroupGloo":
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's types lack it
    options._timeout = timedelta(seconds=about["connect_timeout_s"])
    # By itself gloo listens where this machine's name points to, which may be nowhere.
    address = own_address(about["host"], about["port"])
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl_group(store: dist.Store, rank: int, size: int) -> "dist.ProcessGroupNCCL":
    """``finish`` keeps the time, not NCCL's watchdog, which would end this process."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)
    with _unwatched:
        return dist.ProcessGroupNCCL(store, rank, size, options)


class _Unwatched:
    """Inside, NCCL groups are made whose watchdog ends no process.

    torch reads that from the environment, which all threads share: the first one in sets it, the
    last one out puts back what was there. Nobody waits for another here, since ranks that make
    their groups in different orders would wait for each other.
    """

    KEY = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._before: str | None = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = os.environ.get(self.KEY)
                os.environ[self.KEY] = "0"
            self._inside += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside:
                return
            if self._before is None:
                del os.environ[self.KEY]
            else:
                os.environ[self.KEY] = self._before


_unwatched = _Unwatched()
