"""Buckets from point to point, over gloo or NCCL, cut to each engine rank's own part.

The training ranks feed only so many engines that each engine rank has a training rank of its own;
with more, the training ranks' links would be the bottleneck. The other engines stand behind these
in chains (``chains_of``). Each engine passes on what it gets, a chunk at a time, while more comes,
so the last engine of a chain has a bucket little later than the first.

An engine that training ranks feed has a link of its own (``link``): a process group of all training
ranks, then its ranks. So an engine that fails does not disturb the others. In a chain, each rank
has a link of two with the same rank of the engine before it, and of the one behind it. Engines
behind one that dies miss the rest of that version, and stand elsewhere in the next one.

A link stays open from version to version. A training rank drops it unless the engine has the whole
version, so that no bytes of one version are taken for the next one's.
"""

import logging
import math
import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.wire import SLOTS
from qurl_megatron.wire.link import CONNECT_S, Link, Refused, agreed_link, unwatched
from qurl_megatron.wire.message import Blob, Receipt, Turn, fill, lay_out
from qurl_megatron.wire.store import gist, join_store, leave_in, store_of, take_from
from qurl_megatron.wire.transport import Failures, Rank, Sender, Site, own_facts

logger = logging.getLogger(__name__)

DIRECT = {"from": "", "to": "", "kept_from": False, "kept_to": False, "patience_s": 0.0}
"""The route of an engine that training ranks feed, and that feeds none."""

CHUNK = 16 << 20  # bytes


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
