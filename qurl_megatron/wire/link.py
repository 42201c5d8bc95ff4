"""One process group between all training ranks (first) and the ranks of one engine (after them).

Before every version the ends of a link compare notes: who is present, what they run, and whether
the link can be reused. Each end leaves one line in a store and reads everybody's, so all come to
the same conclusion: a link that every end holds, and over which as much has come as was sent, stays
open; otherwise all open the same new one. It may have been dropped at one end alone, the engine may
be another process under its old name, and bytes of an abandoned version in a link must never be
taken for the next one's.

gloo connects every pair when the group is made. NCCL would make a communicator for each pair that
sends, at its first message, and block indefinitely on the peer meanwhile. So the group's one
communicator is made at once, serves all pairs, and an empty greeting from every training rank to
every engine rank opens the connections that NCCL opens late; all of it under a deadline.

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

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.kit.network import own_address
from qurl_megatron.kit.record import Count, Malformed, Record, decode
from qurl_megatron.wire.facts import disagreement, own_facts

POLL_S = 0.001
KEPT = 2  # meetings whose lines stay in the store: a late end may still read the one before
GREETING = 2**30  # tag; far above the number of any bucket
ABORT_S = 30.0
GRACE_S = 0.1


class LinkError(RuntimeError):
    """Why a link cannot be opened or used; a RuntimeError as all of torch's are."""


class Refused(LinkError):
    """The two ends can never be joined; waiting does not help."""


class Hello(Record, frozen=True):
    """One end's line."""

    link: str  # the one it holds; "": none
    moved: tuple[Count, ...]  # messages sent to (come from) each rank of the other side over it
    facts: dict[str, str]


def read_hello(content: bytes) -> Hello:
    """Parse one end's line.

    Raises:
        LinkError: it is of another version of this package.
    """
    try:
        return decode(Hello, content)
    except Malformed as error:
        raise LinkError(f"an end of the link sent a malformed line: {error}") from None


@dataclass(frozen=True)
class Meeting:
    """Where the ends of one link meet for one version."""

    about: Mapping[str, Any]  # ``GroupSender.describe``
    store: dist.Store

    def announce(self, tp: int) -> None:
        """On the leading training rank: say how many ranks the engine has."""
        self.store.set(self._key("size"), str(tp))

    def size(self) -> int:
        """Return the number of the engine's ranks; waits as long as the store does.

        Raises:
            RuntimeError: the trainer did not say.
        """
        return int(self.store.get(self._key("size")))

    def attend(self, rank: int, tp: int, hello: Hello) -> list[Hello]:
        """Return everybody's lines, by rank: training ranks first, then the engine's.

        Raises:
            LinkError: somebody did not come in time; names them.
        """
        self.store.set(self._key(rank), msgspec.json.encode(hello).decode())
        old = self.about["update"] - KEPT - 1
        self.store.delete_key(self._key(rank, old))
        if rank == 0:
            self.store.delete_key(self._key("size", old))
        keys = [self._key(other) for other in range(self.about["senders"] + tp)]
        try:
            self.store.wait(keys, timedelta(seconds=self.about["connect_timeout_s"]))
        except RuntimeError as error:
            late = [self._who(other) for other, key in enumerate(keys) if not self._has(key)]
            raise LinkError(f"{', '.join(late)} did not come" if late else str(error)) from None
        return [read_hello(content) for content in self.store.multi_get(keys)]

    def _has(self, key: str) -> bool:
        return self.store.check([key])

    def _who(self, rank: int) -> str:
        senders = self.about["senders"]
        if rank < senders:
            return f"training rank {rank}"
        return f"engine rank {rank - senders}"

    def _key(self, what: int | str, number: int | None = None) -> str:
        if number is None:
            number = self.about["update"]
        return f"meeting/{number}/{self.about['engine']}/{what}"


def agreed_link(
    meeting: Meeting, current: "Link | None", *, rank: int, tp: int, device: torch.device
) -> "Link":
    """Return the link for this version: the current one if it can be reused, else a new one.

    Raises:
        RuntimeError: there is none; the current one is aborted.
    """
    about = meeting.about
    hello = Hello("", (), own_facts())
    if current is not None:
        hello = Hello(current.id, tuple(current.moved), hello.facts)
    try:
        hellos = meeting.attend(rank, tp, hello)
        for other in hellos[1:]:
            if reason := disagreement(about["backend"], hellos[0].facts, other.facts):
                raise Refused(reason)
        if current is not None and still_open(hellos, about["senders"]):
            return current
    except RuntimeError:
        if current is not None:
            current.abort()
        raise
    if current is not None:
        current.abort()
    link = f"{about['engine']}/{about['update']}"
    return open_link(about, meeting.store, link, rank=rank, tp=tp, device=device)


def still_open(hellos: Sequence[Hello], senders: int) -> bool:
    """True if all hold the same link, and all that was sent over it has come."""
    links = {hello.link for hello in hellos}
    if len(links) > 1 or "" in links:
        return False
    for source in range(senders):
        for rank in range(len(hellos) - senders):
            if hellos[source].moved[rank] != hellos[senders + rank].moved[source]:
                return False
    return True


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
        """Wait for messages from the given ranks of the group.

        Raises:
            RuntimeError: the link is broken, or nothing came in time.
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
        """Begin all moves together: one after another they would wait for each other."""
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
        # NCCL's own wait makes the stream wait alone. Work that ended unobserved is not late.
        deadline = max(deadline, time.monotonic() + GRACE_S)
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise LinkError("timed out")
            time.sleep(POLL_S)
        work.wait()

    def abort(self) -> None:
        """Stop all that moves on it; whatever waits for it fails."""
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
    """Open a new link; every end calls it, with its rank in the group.

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
    """Run ``act`` in a thread and return its result: NCCL's calls take no deadline.

    Args:
        late: called in the thread if ``act`` returns when nobody waits for it any more.

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
    """A block in which NCCL groups are made whose watchdog ends no process.

    torch reads that from the environment, which all threads share: the first one in sets it, the
    last one out restores it. Nobody waits for another here, since ranks that make their groups in
    different orders would wait for each other.
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
