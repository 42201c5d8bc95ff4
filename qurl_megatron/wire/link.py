"""A link of the transport ``group``: a process group of gloo or NCCL between two sides.

Neither side needs a default process group, and one that exists is left alone.

Before each version every end of a link leaves a line in the store and reads all others, so all
reach the same decision: a link that every end still holds is used again, otherwise all open a new
one. An end may have dropped its link, or the engine may be another process under the old name.

gloo connects every pair when the group is made. NCCL would make a communicator for each pair at its
first message, and block on the peer without a limit. So the group's one communicator is made at
once and serves all pairs, and a one-byte greeting from every training rank to every engine rank
opens the connections that NCCL opens late; all of it under a deadline.

Whether a peer dies or only stops, every wait ends within its timeout, and a link that failed is
aborted, so that no kernel keeps waiting on the GPU.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.kit.network import own_address
from qurl_megatron.kit.record import Malformed, Record, decode
from qurl_megatron.wire.transport import POLL_S, disagreement, own_facts

CONNECT_S = {"cpu": 30.0, "cuda": 120.0}
KEPT = 2  # meetings whose lines stay in the store: a late end may still read the previous one
GREETING = 2**30  # tag; far above the number of any bucket
ABORT_S = 30.0
GRACE_S = 0.1
WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class LinkError(RuntimeError):
    """Why a link cannot be opened or used; a RuntimeError as all of torch's are."""


class Refused(LinkError):
    """The two ends can never be joined; waiting does not help."""


class Hello(Record, frozen=True):
    """One end's line in the store."""

    link: str = ""  # id of the link that it holds; "": none
    refusal: str = ""  # why the ends cannot be joined


def read_hello(content: bytes) -> Hello:
    """Parse one end's line.

    Raises:
        LinkError: the line is malformed, such as that of another version of this package.
    """
    try:
        return decode(Hello, content)
    except Malformed as error:
        raise LinkError(f"an end of the link sent a malformed line: {error}") from None


def agreed_link(
    about: Mapping[str, Any],
    store: dist.Store,
    current: "Link | None",
    rank: int,
    device: torch.device,
) -> "Link":
    """Return the link for this version: the current one if every end holds it, else a new one.

    A current link that is not returned is aborted.

    Args:
        about: ``GroupSender.describe``.
        rank: in the link's group.

    Raises:
        RuntimeError: not all ends came, they cannot be joined, or they cannot reach each other.
    """
    refusal = None
    if rank >= about["senders"]:
        refusal = disagreement(about["backend"], about["facts"], own_facts())
    reused = None
    try:
        hellos = _met(about, store, rank, Hello(current.id if current else "", refusal or ""))
        for other in hellos:
            if other.refusal:
                raise Refused(other.refusal)
        if current is not None and all(other.link == current.id for other in hellos):
            reused = current
    finally:
        if current is not None and reused is None:
            current.abort()
    return reused or open_link(about, store, rank, device)


def _met(about: Mapping[str, Any], store: dist.Store, rank: int, hello: Hello) -> list[Hello]:
    """Leave this end's line; return the lines of all: training ranks first, then engine ranks.

    Raises:
        LinkError: an end did not come in time; names all such ends.
    """

    def key(other: int, update: int) -> str:
        return f"meeting/{update}/{about['engine']}/{other}"

    update, senders = about["update"], about["senders"]
    store.set(key(rank, update), msgspec.json.encode(hello).decode())
    store.delete_key(key(rank, update - KEPT - 1))
    keys = [key(other, update) for other in range(senders + about["ranks"])]
    try:
        store.wait(keys, timedelta(seconds=about["connect_timeout_s"]))
    except RuntimeError as error:
        absent = [other for other, name in enumerate(keys) if not store.check([name])]
        if not absent:
            raise LinkError(str(error)) from None
        names = about.get("ends") or [
            *(f"training rank {rank}" for rank in range(senders)),
            *(f"engine rank {rank}" for rank in range(about["ranks"])),
        ]
        raise LinkError(f"{', '.join(names[other] for other in absent)} did not come") from None
    return [read_hello(content) for content in store.multi_get(keys)]


@dataclass
class Link:
    """One end of the connection between the trainer, or an engine, and one engine."""

    id: str
    group: Any  # a ProcessGroupGloo or NCCL, whose methods torch's types leave out
    device: torch.device
    ranks: int  # of the engine
    sending: dict[int, list[dist.Work]] = field(default_factory=dict)  # by bucket
    deadline: dict[int, float] = field(default_factory=dict)

    def send(self, messages: Sequence[tuple[int, Tensor]], tag: int) -> list[dist.Work]:
        """Begin to send to the given ranks of the group, to all of them at once.

        Raises:
            RuntimeError: the link is broken.
        """
        return self._move(self.group.send, messages, tag) if messages else []

    def receive(self, messages: Sequence[tuple[int, Tensor]], tag: int) -> list[dist.Work]:
        """Begin to receive from the given ranks of the group, from all of them at once.

        Raises:
            RuntimeError: the link is broken.
        """
        return self._move(self.group.recv, messages, tag)

    def _move(
        self, move: Callable, messages: Sequence[tuple[int, Tensor]], tag: int
    ) -> list[dist.Work]:
        if self.device.type == "cpu":
            return [move([memory], rank, tag) for rank, memory in messages]
        # Grouped: single NCCL calls would wait for each other.
        self.group._start_coalescing()
        try:
            for rank, memory in messages:
                move([memory], rank, tag)
        finally:  # a group of calls left open would swallow this thread's next collective
            work = self.group._end_coalescing()
        return [work]

    def finish(self, work: dist.Work, deadline: float) -> None:
        """Wait until the bytes are sent or received.

        Raises:
            RuntimeError: the peer is gone, or the deadline is past.
        """
        if self.device.type == "cpu":
            left_s = max(deadline - time.monotonic(), 0.001)  # gloo takes 0 for "forever"
            work.wait(timedelta(seconds=left_s))
            return
        # NCCL's own wait blocks only the stream. Work that ended unobserved is not late.
        deadline = max(deadline, time.monotonic() + GRACE_S)
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise LinkError("timed out")
            time.sleep(POLL_S)
        work.wait()

    def sent(self, index: int) -> None:
        """Wait until all of ``sending[index]`` is sent.

        Raises:
            RuntimeError: a peer is gone, or the deadline is past.
        """
        for work in self.sending.pop(index, ()):
            self.finish(work, self.deadline[index])

    def abort(self) -> None:
        """Stop all transfers; waits for them fail."""
        self.sending.clear()
        if self.device.type == "cpu":
            self.group.abort()
            return
        with suppress(LinkError):  # where NCCL hangs in the abort, leave it to the thread
            within(ABORT_S, self.group.abort, late=lambda: None)


def open_link(about: Mapping[str, Any], store: dist.Store, rank: int, device: torch.device) -> Link:
    """Open this version's new link; every end calls it, with its rank in the group.

    Raises:
        RuntimeError: not all came in time, or they cannot reach each other.
    """
    senders, ranks, wait_s = about["senders"], about["ranks"], about["connect_timeout_s"]
    deadline = time.monotonic() + wait_s
    name = f"{about['engine']}/{about['update']}"
    prefixed = dist.PrefixStore(f"link/{name}", store)
    group = open_group(prefixed, rank, senders + ranks, device, about["host"], wait_s)
    link = Link(name, group, device, ranks)
    if device.type == "cpu":
        return link

    def join() -> None:
        group.eager_connect_single_device(device)
        _greet(link, rank, senders, deadline)

    try:
        within(deadline - time.monotonic(), join, late=link.abort)
    except RuntimeError:
        link.abort()
        raise
    return link


def open_group(
    store: dist.Store, rank: int, size: int, device: torch.device, goal: str, wait_s: float
) -> Any:
    """Return a connected group of gloo, or one of NCCL, for which the caller keeps the time.

    Args:
        goal: an address in the peers' network.
    """
    if device.type == "cpu":
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's types lack it
        gloo._timeout = timedelta(seconds=wait_s)
        # By default gloo listens at the address of this machine's name, which may lead nowhere.
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(goal))]
        return dist.ProcessGroupGloo(store, rank, size, gloo)
    nccl = dist.ProcessGroupNCCL.Options()
    nccl._timeout = timedelta(days=1)
    return dist.ProcessGroupNCCL(store, rank, size, nccl)


def _greet(link: Link, rank: int, senders: int, deadline: float) -> None:
    """Send one byte from every training rank to every engine rank."""
    sends = rank < senders
    peers = range(senders, senders + link.ranks) if sends else range(senders)
    memory = torch.zeros(len(peers), dtype=torch.uint8, device=link.device)
    messages = [(peer, memory[i : i + 1]) for i, peer in enumerate(peers)]
    for work in (link.send if sends else link.receive)(messages, GREETING):
        link.finish(work, deadline)


def within(seconds: float, act: Callable[[], Any], late: Callable[[], Any]) -> Any:
    """Run ``act`` in a thread and return its result: NCCL's calls take no deadline.

    Args:
        late: called in the thread where ``act`` returns too late.

    Raises:
        LinkError: ``act`` took longer. The thread lives until it returns.
    """
    outcome_future: Future = Future()

    def run() -> None:
        try:
            outcome = act()
        except BaseException as error:  # the caller's
            outcome_future.set_exception(error)
        else:
            outcome_future.set_result(outcome)

    threading.Thread(target=run, name="link", daemon=True).start()
    if wait([outcome_future], max(seconds, 0.0)).not_done:
        outcome_future.add_done_callback(lambda _: late())
        raise LinkError(f"not done within {seconds:.1f} s")
    return outcome_future.result()


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, NCCL groups are made with a watchdog that does not end the process.

    torch reads this from the environment, which all threads share.
    """
    before = os.environ.get(WATCHDOG)
    os.environ[WATCHDOG] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[WATCHDOG]
        else:
            os.environ[WATCHDOG] = before
