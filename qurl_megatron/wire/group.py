"""Buckets from point to point, over gloo or NCCL, cut to each engine rank's own part.

The training ranks feed only so many engines that each engine rank has a training rank of its own;
with more, the training ranks' links would be the bottleneck. The other engines stand behind these
in chains (``chains_of``). Each engine passes on what it gets, a chunk at a time, while more comes,
so the last engine of a chain has a bucket little later than the first.

An engine that training ranks feed has a link of its own: a process group of all training ranks,
then its ranks. So an engine that fails does not disturb the others. In a chain, each rank has a
link of two with the same rank of the engine before it, and of the one behind it. Engines behind one
that dies miss the rest of that version, and stand elsewhere in the next one.

A link's ends meet in a TCP store that the leading training rank hosts; receipts come back through
it. Neither side needs a default process group, and one that exists is left alone.

A link stays open from version to version. A training rank drops it unless the engine has the whole
version, so that no bytes of one version are taken for the next one's. Before each version every
end leaves a line in the store and reads all others, so all reach the same decision: a link that
every end still holds is used again, otherwise all open a new one. An end may have dropped its link,
or the engine may be another process under the old name.

gloo connects every pair when the group is made. NCCL would make a communicator for each pair at its
first message, and block on the peer without a limit. So the group's one communicator is made at
once and serves all pairs, and a one-byte greeting from every training rank to every engine rank
opens the connections that NCCL opens late; all of it under a deadline.

Whether a peer dies or only stops, every wait ends within its timeout, and a link that failed is
aborted, so that no kernel keeps waiting on the GPU.

Nothing here is encrypted or authenticated, as with all of gloo and NCCL: bind the store to an
address that only the cluster reaches.
"""

import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.network import own_address
from qurl_megatron.kit.record import Malformed, Record, decode
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.wire import SLOTS
from qurl_megatron.wire.message import Blob, Receipt, Turn, fill, lay_out
from qurl_megatron.wire.transport import (
    POLL_S,
    Failures,
    Rank,
    Sender,
    Site,
    disagreement,
    own_facts,
    receipt_name,
)

logger = logging.getLogger(__name__)

CONNECT_S = {"cpu": 30.0, "cuda": 120.0}
DIRECT = {"from": "", "to": "", "kept_from": False, "kept_to": False, "patience_s": 0.0}
"""The route of an engine that training ranks feed, and that feeds none."""

CHUNK = 16 << 20  # bytes
KEPT = 2  # meetings whose lines stay in the store: a late end may still read the previous one
GREETING = 2**30  # tag; far above the number of any bucket
ABORT_S = 30.0
GRACE_S = 0.1
WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class LinkError(RuntimeError):
    """Why a link cannot be opened or used; a RuntimeError as all of torch's are."""


class Refused(LinkError):
    """The two ends can never be joined; waiting does not help."""


def host_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Host the store in which all ends meet, on a free port of the address ``host`` alone.

    Raises:
        ConfigError: it is not an address of this machine.
    """
    listener = _listen(host)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def check_host(host: str) -> None:
    """Raise ConfigError unless ``host_store`` could have its store there."""
    _listen(host).close()


def join_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Connect to the store; each thread needs a connection, which serves one wait at a time."""
    return dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def store_of(site: Site, host: str) -> dist.TCPStore:
    """Return this rank's end of the store that the leading rank hosts; all ranks call it together.

    Args:
        host: the leading rank's address, where sync.host names none.

    Raises:
        ConfigError: as ``host_store``, on every rank.
    """
    host = site.host or host
    store, failure = None, None
    if site.leads:
        try:
            store = host_store(host, site.timeout_s)
        except ConfigError as error:  # the others must not wait for a port
            failure = error
    port, failure = site.share((store and store.port, failure))
    if failure is not None:
        raise failure
    return store or join_store(host, port, site.timeout_s)


def leave_in(store: dist.TCPStore, receipt: Receipt) -> None:
    """Leave an engine rank's receipt for the leading training rank.

    Raises:
        ConfigError: the store is gone.
    """
    try:
        content = msgspec.json.encode(receipt).decode()
        store.set(receipt_name(receipt.session, receipt.rank), content)
    except RuntimeError as error:
        raise ConfigError(f"the trainer's store is gone: {gist(error)}") from None


def take_from(store: dist.TCPStore, name: str) -> bytes | None:
    """Return a receipt and remove it; None: it is not there yet."""
    if not store.check([name]):
        return None
    content = store.get(name)
    store.delete_key(name)
    return content


def chains_of(
    engines: Mapping[str, int],
    senders: int,
    proven: Collection[str] = (),
    previous: Sequence[Sequence[str]] = (),
) -> list[list[str]]:
    """Return the engines in chains: training ranks feed the first engine, which feeds the next.

    Args:
        engines: their TP sizes; engines of one size need the same bytes.
        senders: number of training ranks.
        proven: engines that took the previous version. The others stand behind them.
        previous: the chains of that version. Of the engines that missed it, those that stood first
            may have made the others miss it, and so stand last.
    """
    places = {engine: place for chain in previous for place, engine in enumerate(chain)}

    def rank(engine: str) -> tuple[bool, float]:
        return engine not in proven, 0 if engine in proven else -places.get(engine, math.inf)

    by_size: dict[int, list[str]] = {}
    for engine in sorted(engines, key=rank):
        by_size.setdefault(engines[engine], []).append(engine)
    chains: list[list[str]] = []
    for ranks, names in by_size.items():
        count = max(1, senders // (ranks * len(by_size)))  # engines that training ranks feed
        chains += [names[first::count] for first in range(min(count, len(names)))]
    return chains


class GroupSender(Sender):
    kind = "group"
    cut = True

    def __init__(
        self,
        store: dist.TCPStore,
        rank: int,
        size: int,
        *,
        device: torch.device | str = "cpu",
        timeout_s: float = 300.0,
        connect_timeout_s: float | None = None,
    ) -> None:
        """
        Args:
            store: ``host_store`` on rank 0, ``join_store`` to that on the others.
            rank, size: of all training ranks.
            device: where the weights are; decides between gloo and NCCL.
            timeout_s: an engine that has not taken a bucket by then is dropped.
            connect_timeout_s: an engine that has not come to its link by then is dropped too. NCCL
                needs long to open many links at once.
        """
        self.store, self.rank, self.size = store, rank, size
        self.device = torch.device(device)
        self.timeout_s = timeout_s
        self.connect_timeout_s = connect_timeout_s or CONNECT_S[self.device.type]
        self._facts = own_facts()
        self._run = secrets.token_hex(4)  # sent to engines by the leading rank alone
        self._updates = 0  # begun; all ranks count alike, so they agree on names made from it
        self._finished = True
        self._links: dict[str, Link] = {}
        self._chains: list[list[str]] = []
        self._routes: dict[str, dict[str, Any]] = {}
        self._complete: set[str] = set()  # engines that have all of the version so far
        self._previous_chains: list[list[str]] = []  # of the version before
        self._proven: set[str] = set()  # engines that have all of it
        self._stores: dict[str, dist.TCPStore] = {}  # one for each engine, to wait there
        self._failures: Failures = {}
        self._memory: dict[tuple[int, Rank], Tensor] = {}  # by slot
        self._ready: dict[int, dict[Rank, Tensor]] = {}  # blobs put so far, by bucket

    @classmethod
    def open(cls, site: Site) -> "GroupSender":
        # Where torchrun or srun had the ranks meet, engines can reach the leading one too.
        host = "127.0.0.1" if site.one_machine else os.environ["MASTER_ADDR"]
        store = store_of(site, host)
        return cls(store, site.rank, site.size, device=site.device, timeout_s=site.timeout_s)

    def describe(self, engine: str, ranks: int) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "backend": "nccl" if self.device.type == "cuda" else "gloo",
            "host": self.store.host,
            "port": self.store.port,
            "run": self._run,
            "engine": engine,
            "ranks": ranks,
            "update": self._updates,
            "senders": self.size,
            "chunk": CHUNK,
            "timeout_s": self.timeout_s,
            "connect_timeout_s": self.connect_timeout_s,
            "facts": self._facts,
            "route": self._routes.get(engine, DIRECT),
        }

    def arrange(self, engines: Mapping[str, int]) -> dict[str, Turn]:
        chains = chains_of(engines, self.size, self._proven, self._previous_chains)
        self._chains, self._complete = chains, set(engines)
        # A new dictionary: other threads may be reading the old one.
        self._routes = {engine: self._route(chain, engine) for chain in chains for engine in chain}
        turns: dict[str, Turn] = {}
        for chain in chains:
            alike = [other for other in chains if engines[other[0]] == engines[chain[0]]]
            turns |= dict.fromkeys(chain, (alike.index(chain), len(alike)))
        return turns

    def begin(self, version: int) -> None:
        if not self._finished:
            self._hang_up()  # the links may hold bytes of a version that was abandoned
        self._finished = False
        self._proven, self._previous_chains = self._complete, self._chains
        self._failures.clear()
        self._ready.clear()
        self._updates += 1

    def connect(self, engines: Mapping[str, int]) -> Failures:
        self.arrange(engines)
        direct = {name: n for name, n in engines.items() if not self._routes[name]["from"]}
        for unneeded in self._links.keys() - direct.keys():
            self._unlink(unneeded)
        if direct:
            # A missing engine delays no other.
            with unwatched(), ThreadPoolExecutor(len(direct)) as pool:
                links = list(pool.map(self._connect, direct.keys(), direct.values()))
            for engine, link in zip(direct, links, strict=True):
                if isinstance(link, Link):
                    self._links[engine] = link
                else:
                    self._failures[engine] = link
                    self.drop(engine)
        return dict(self._failures)

    def put(self, index: int, parts: Sequence[Shard], *, to: Rank | None = None) -> Blob:
        assert to is not None, "each engine rank gets blobs of its own"
        self._await(index - SLOTS)
        planned, size = lay_out(parts)
        slot = index % SLOTS, to
        if slot not in self._memory or len(self._memory[slot]) < size:
            self._memory[slot] = torch.empty(size, dtype=torch.uint8, device=self.device)
        memory = self._memory[slot][:size]
        pieces = fill(memory, planned, [part.value for part in parts])
        if pieces:  # nobody waits for an empty blob
            self._ready.setdefault(index, {})[to] = memory
        return Blob({"source": self.rank, "index": index}, size, pieces)

    def deliver(self, index: int) -> None:
        ready = sorted(self._ready.pop(index, {}).items(), key=lambda item: item[0])
        for engine, link in list(self._links.items()):
            messages = [
                (self.size + rank, chunk)
                for (tp, rank), memory in ready
                if tp == link.ranks
                for chunk in memory.split(CHUNK)
            ]
            link.deadline[index] = time.monotonic() + self.timeout_s
            with self._dropping(engine):
                link.sending[index] = link.send(messages, _tag(index, self.rank, self.size))

    def settle(self) -> Failures:
        for index in sorted({i for link in self._links.values() for i in link.sending}):
            self._await(index)
        return dict(self._failures)

    def drop(self, engine: str) -> None:
        self._complete.discard(engine)
        self._unlink(engine)

    def _unlink(self, engine: str) -> None:
        link = self._links.pop(engine, None)
        self._stores.pop(engine, None)
        if link is not None:
            link.abort()
            # A transfer may still read the old memory: later buckets get new memory.
            self._memory.clear()

    def take_receipt(self, name: str) -> bytes | None:
        return take_from(self.store, name)

    def finish(self) -> None:
        self._finished = True

    def close(self) -> None:
        self._hang_up()
        self._stores.clear()
        self._memory.clear()

    def _hang_up(self) -> None:
        self._complete = set()
        for engine in list(self._links):
            self.drop(engine)

    def _route(self, chain: Sequence[str], engine: str) -> dict[str, Any]:
        """Return where the engine gets its bytes, and where it passes them on.

        The fewer engines stand behind it, the shorter it waits for the next one, so that the engine
        before one that hangs gives up first, and no engine that is merely held up is dropped.
        """
        place = chain.index(engine)
        source = chain[place - 1] if place else ""
        behind = chain[place + 1 :]
        return {
            "from": source,
            "to": behind[0] if behind else "",
            "kept_from": self._kept(source, engine),
            "kept_to": bool(behind) and self._kept(engine, behind[0]),
            "patience_s": self.timeout_s * len(behind) / len(chain),
        }

    def _kept(self, source: str, engine: str) -> bool:
        """Return whether the previous version went this way whole, so no bytes of it are left."""
        passed_on = any((source, engine) in pairwise(chain) for chain in self._previous_chains)
        return passed_on and self._proven.issuperset((source, engine))

    def _connect(self, engine: str, ranks: int) -> "Link | str":
        """Return the link, or why there is none."""
        about = self.describe(engine, ranks)
        try:
            store = self._stores.get(engine)
            if store is None:
                store = join_store(about["host"], about["port"], self.connect_timeout_s)
                self._stores[engine] = store
            return agreed_link(about, store, self._links.get(engine), self.rank, self.device)
        except Refused as error:
            return str(error)
        except (RuntimeError, OSError) as error:  # as torch does when a connection fails
            return (
                f"training rank {self.rank} could not reach its {ranks} ranks within "
                f"{self.connect_timeout_s:g} s: {gist(error)}"
            )

    def _await(self, index: int) -> None:
        """Wait until each engine has the bucket ``index`` or is dropped."""
        for engine, link in list(self._links.items()):
            with self._dropping(engine):
                link.sent(index)

    @contextmanager
    def _dropping(self, engine: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._failures[engine] = (
                f"it did not take a bucket from training rank {self.rank} within "
                f"{self.timeout_s:g} s: {gist(error)}"
            )
            self.drop(engine)


class GroupReceiver:
    def __init__(self, transport: dict[str, Any], rank: int) -> None:
        """
        Raises:
            ConfigError: the training ranks cannot be reached, do not come in time, or have an
                incompatible version.
        """
        self._timeout_s, self._rank = transport["timeout_s"], rank
        self._device = torch.device("cpu")
        if transport["backend"] == "nccl":
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._clear_memory()
        self._fetched = 0
        self._bucket = -1  # that is being fetched, of this version
        self._pass_deadline = 0.0  # for the next engine to take the bucket
        self._sender = _identity(transport)
        self._senders, self._chunk = transport["senders"], transport["chunk"]
        self._link: Link | None = None
        self._onward: Link | None = None  # to the next engine of a chain
        self._lost = ""  # why there is no link
        self._stores: list[dist.TCPStore] = []  # one for each link, to wait there
        self._meet(transport)

    def follow(self, transport: dict[str, Any]) -> bool:
        if _identity(transport) != self._sender:
            return False  # of another trainer, or another transport
        self._meet(transport)
        return True

    def fetch(self, blob: Blob) -> Tensor:
        if self._link is None:
            raise ConfigError(self._lost or "the link to the training ranks is not open")
        source, index = blob.where["source"], blob.where["index"]
        tag = _tag(index, source, self._senders)
        peer = 0 if self._route["from"] else source
        if index != self._bucket:
            self._bucket = index
            self._pass_deadline = time.monotonic() + self._route["patience_s"]
        memory = self._next_memory(blob.bytes)
        chunks = memory.split(self._chunk)
        try:
            deadline = time.monotonic() + self._timeout_s
            coming = [self._link.receive([(peer, chunk)], tag) for chunk in chunks]
            for chunk, works in zip(chunks, coming, strict=True):
                for work in works:
                    self._link.finish(work, deadline)
                self._pass_on(chunk, tag)
        except RuntimeError as error:
            # Abort at once: a kernel that waits for the sender would block the GPU.
            self._hang_up()
            sender = self._route["from"] or f"training rank {source}"
            raise ConfigError(
                f"{sender} did not send {blob.bytes / 1e6:.1f} MB within {self._timeout_s:g} s: "
                f"{gist(error)}"
            ) from None
        return memory

    def report(self, receipt: Receipt) -> None:
        for slot in range(SLOTS):  # no kernel may wait for the next engine once this one serves
            self._await_passed(slot)
        leave_in(self._stores[0], receipt)

    def close(self) -> None:
        self._hang_up()
        # The sockets close with the last reference.
        self._stores.clear()
        self._memory.clear()

    def _clear_memory(self) -> None:
        """Allocate new memory: transfers of a link that is gone may still write to the old one."""
        # One blob is passed on while the next one comes in.
        self._memory = [torch.empty(0, dtype=torch.uint8, device=self._device)] * SLOTS

    def _next_memory(self, size: int) -> Tensor:
        """Return memory whose previous bytes have been passed on."""
        self._fetched += 1
        slot = self._slot()
        self._await_passed(slot)
        if self._onward:
            self._onward.sending[slot] = []
            self._onward.deadline[slot] = self._pass_deadline
        if len(self._memory[slot]) < size:
            self._memory[slot] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._memory[slot][:size]

    def _pass_on(self, chunk: Tensor, tag: int) -> None:
        """Begin to send a chunk of the last ``_next_memory``."""
        if self._onward:
            with self._passing_on():
                works = self._onward.send([(1, chunk)], tag)
                self._onward.sending[self._slot()] += works

    def _await_passed(self, slot: int) -> None:
        if self._onward:
            with self._passing_on():
                self._onward.sent(slot)

    def _slot(self) -> int:
        return self._fetched % SLOTS if self._onward else 0

    @contextmanager
    def _passing_on(self) -> Iterator[None]:
        """Inside, a failure of the next engine is logged, and this one goes on without it."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            logger.warning("%s takes nothing from this engine: %s", self._route["to"], gist(error))
            self._hang_up_onward()

    def _meet(self, transport: dict[str, Any]) -> None:
        """Open both links, or keep them.

        Raises:
            ConfigError: the training ranks cannot be met. A missing engine before this one is an
                error of ``fetch`` instead, and so of the receipt: no training rank sees it.
        """
        host, port, wait_s = (transport[x] for x in ("host", "port", "connect_timeout_s"))
        route = self._route = transport["route"]
        links_before = self._link, self._onward
        try:
            while len(self._stores) < 2:
                self._stores.append(join_store(host, port, wait_s))
            link, self._link, self._lost = self._link, None, ""
            self._bucket = -1
            with unwatched(), ThreadPoolExecutor(1) as pool:
                opening = pool.submit(self._meet_next, transport)
                try:
                    about, rank = transport, self._senders + self._rank
                    if route["from"]:
                        about = _pair(transport, route["from"], transport["engine"], self._rank)
                        rank = 1
                        link = _unless_old(link, route["kept_from"])
                    self._link = agreed_link(about, self._stores[0], link, rank, self._device)
                finally:
                    opening.result()
        except (RuntimeError, OSError) as error:
            whom = route["from"] or f"the training ranks at {host}:{port}"
            self._lost = (
                f"engine rank {self._rank} could not meet {whom} within {wait_s:g} s: {gist(error)}"
            )
            if isinstance(error, Refused):
                self._lost = str(error)
            self._hang_up_onward()
            if not route["from"]:
                raise ConfigError(self._lost) from None
        finally:
            if self._link is not links_before[0] or self._onward is not links_before[1]:
                self._clear_memory()

    def _meet_next(self, transport: dict[str, Any]) -> None:
        """Open the link to the next engine of the chain, or keep it."""
        route = self._route
        onward, self._onward = _unless_old(self._onward, route["kept_to"]), None
        if route["to"]:
            about = _pair(transport, transport["engine"], route["to"], self._rank)
            with self._passing_on():
                self._onward = agreed_link(about, self._stores[1], onward, 0, self._device)

    def _hang_up(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.abort()
            self._clear_memory()
        self._hang_up_onward()

    def _hang_up_onward(self) -> None:
        onward, self._onward = self._onward, None
        if onward is not None:
            onward.abort()
            self._clear_memory()


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


def _identity(transport: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a sender's description that no version changes."""
    return {name: value for name, value in transport.items() if name not in ("update", "route")}


def _pair(transport: Mapping[str, Any], source: str, engine: str, rank: int) -> dict[str, Any]:
    """Describe the link between the same ranks of two engines, as ``GroupSender.describe``."""
    ends = [f"rank {rank} of {name}" for name in (source, engine)]
    name = f"{engine}/rank{rank}"
    return {**transport, "engine": name, "senders": 1, "ranks": 1, "ends": ends}


def _unless_old(link: Link | None, kept: bool) -> Link | None:
    """Return the link if it may be used again; abort it otherwise."""
    if link is not None and not kept:
        link.abort()
    return link if kept else None


def _tag(index: int, source: int, senders: int) -> int:
    """Return the tag of one training rank's bytes in a bucket."""
    return index * senders + source


def _listen(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0), backlog=1024)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # Python adds the address
        raise ConfigError(
            f"training rank 0 cannot listen at {host!r} for engines ({reason}); set sync.host to "
            "an address of its own machine that they reach, as `ip address` shows them there"
        ) from None


def gist(error: Exception) -> str:
    """Return the cause, without torch's source location and stack."""
    line = str(error).partition("\n")[0]
    return line.partition("] ")[2] if line.startswith("[") else line
