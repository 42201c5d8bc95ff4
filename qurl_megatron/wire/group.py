"""Buckets from point to point, over gloo or NCCL, cut to each engine rank's own part.

Each engine has a link of its own to all training ranks (``link``), so an engine that fails does not
disturb the others. A link stays open from version to version. Its ends meet in a TCP store that the
leading training rank hosts, and receipts come back through it. Neither side needs a default group,
and none that it has is touched.

Whatever a peer does, die or only stop, every wait ends within its timeout.

Nothing here is encrypted or authenticated, as with all of gloo and NCCL: bind the store to an
address that only the cluster reaches.
"""

import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.wire import SLOTS
from qurl_megatron.wire.link import POLL_S, Link, Meeting, Refused, agreed_link
from qurl_megatron.wire.message import Blob, Receipt, fill, lay_out
from qurl_megatron.wire.receipts import missing, received
from qurl_megatron.wire.transport import Failures, Rank, Sender, Site

CONNECT_S = {"cpu": 30.0, "cuda": 120.0}


def host_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Host the leading rank's meeting point, on a free port of the address ``host`` alone.

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
    """Connect to the store; a connection holds one wait at a time, so each thread needs its own."""
    return dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


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
        receipt_wait_s: float = 2.0,
    ) -> None:
        """
        Args:
            store: ``host_store`` on rank 0, ``join_store`` to that on the others.
            rank, size: of all training ranks.
            device: where the weights are; decides between gloo and NCCL.
            timeout_s: an engine that has not taken a bucket by then is dropped.
            connect_timeout_s: one that has not come to its link by then, likewise; NCCL takes its
                time for many links at once.
        """
        self.store, self.rank, self.size = store, rank, size
        self.device = torch.device(device)
        self.timeout_s = timeout_s
        self.connect_timeout_s = connect_timeout_s or CONNECT_S[self.device.type]
        self.receipt_wait_s = receipt_wait_s
        self._run = secrets.token_hex(4)  # sent to engines by the leading rank alone
        self._updates = 0  # begun; all ranks count alike, so it makes names that all know
        self._links: dict[str, Link] = {}
        self._stores: dict[str, dist.TCPStore] = {}  # one for each engine, to wait there
        self._failures: Failures = {}
        self._memory: dict[tuple[int, Rank], Tensor] = {}  # by slot
        self._ready: dict[int, dict[Rank, Tensor]] = {}  # blobs put so far, by bucket

    @classmethod
    def open(cls, site: Site) -> "GroupSender":
        # Where torchrun or srun had the ranks meet, engines can reach the leading one too.
        host = site.host or ("127.0.0.1" if site.one_machine else os.environ["MASTER_ADDR"])
        store, failure = None, None
        if site.leads:
            try:
                store = host_store(host, site.timeout_s)
            except ConfigError as error:  # the others must not wait for a port
                failure = error
        port, failure = site.share((store and store.port, failure))
        if failure is not None:
            raise failure
        if store is None:
            store = join_store(host, port, site.timeout_s)
        return cls(store, site.rank, site.size, device=site.device, timeout_s=site.timeout_s)

    def describe(self, engine: str) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "backend": "nccl" if self.device.type == "cuda" else "gloo",
            "host": self.store.host,
            "port": self.store.port,
            "run": self._run,
            "engine": engine,
            "update": self._updates,
            "senders": self.size,
            "timeout_s": self.timeout_s,
            "connect_timeout_s": self.connect_timeout_s,
        }

    def begin(self, version: int) -> None:
        self._failures.clear()
        self._ready.clear()
        self._updates += 1

    def connect(self, engines: Mapping[str, int]) -> Failures:
        for gone in self._links.keys() - engines.keys():
            self.drop(gone)
        if engines:
            with ThreadPoolExecutor(len(engines)) as pool:  # a missing engine delays no other
                links = list(pool.map(self._connect, engines.keys(), engines.values()))
            for engine, link in zip(engines, links, strict=True):
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
            tp = len(link.moved)
            messages = [(self.size + rank, memory) for (of, rank), memory in ready if of == tp]
            link.deadline[index] = time.monotonic() + self.timeout_s
            with self._dropping(engine):
                link.sending[index] = link.send(messages, index)
                for rank, _ in messages:
                    link.moved[rank - self.size] += 1

    def settle(self) -> Failures:
        for index in sorted({i for link in self._links.values() for i in link.sending}):
            self._await(index)
        return dict(self._failures)

    def drop(self, engine: str) -> None:
        link = self._links.pop(engine, None)
        self._stores.pop(engine, None)
        if link is not None:
            link.abort()
            # Buckets on their way may still be read: later ones get memory of their own.
            self._memory.clear()

    def receipts(self, session: str, ranks: int) -> list[Receipt]:
        deadline = time.monotonic() + self.receipt_wait_s
        receipts = []
        for rank in range(ranks):
            key = _receipt(session, rank)
            while not (arrived := self.store.check([key])) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if arrived:
                receipts.append(received(self.store.get(key), session, rank))
            else:
                receipts.append(missing(session, rank))
            self.store.delete_key(key)
        return receipts

    def close(self) -> None:
        for engine in list(self._links):
            self.drop(engine)
        self._stores.clear()
        self._memory.clear()

    def _connect(self, engine: str, tp: int) -> Link | str:
        """Return the link, or why there is none."""
        about, old_link = self.describe(engine), self._links.get(engine)
        if old_link is not None and len(old_link.moved) != tp:
            self.drop(engine)
            old_link = None
        try:
            store = self._stores.get(engine)
            if store is None:
                store = join_store(about["host"], about["port"], self.connect_timeout_s)
                self._stores[engine] = store
            meeting = Meeting(about, store)
            if self.rank == 0:
                meeting.announce(tp)
            link = agreed_link(meeting, old_link, rank=self.rank, tp=tp, device=self.device)
        except Refused as error:
            return str(error)
        except (RuntimeError, OSError) as error:  # torch raises these for most failures on the way
            return (
                f"training rank {self.rank} could not reach its {tp} ranks within "
                f"{self.connect_timeout_s:g} s: {_gist(error)}"
            )
        link.sending.clear()  # of a version that was abandoned; all of it has come
        return link

    def _await(self, index: int) -> None:
        """Wait until all engines have the bucket ``index``, or are dropped."""
        for engine, link in list(self._links.items()):
            with self._dropping(engine):
                for work in link.sending.pop(index, ()):
                    link.finish(work, link.deadline[index])

    @contextmanager
    def _dropping(self, engine: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._failures[engine] = (
                f"it did not take a bucket from training rank {self.rank} within "
                f"{self.timeout_s:g} s: {_gist(error)}"
            )
            self.drop(engine)


class GroupReceiver:
    def __init__(self, transport: dict[str, Any], rank: int) -> None:
        """
        Raises:
            ConfigError: the training ranks cannot be reached, do not come in time, or are made of
                something else.
        """
        self._timeout_s, self._rank = transport["timeout_s"], rank
        self._device = torch.device("cpu")
        if transport["backend"] == "nccl":
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._memory = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._run = self._of(transport)
        self._link: Link | None = None
        self._store: dist.TCPStore | None = None
        self._meet(transport)

    def follow(self, transport: dict[str, Any]) -> bool:
        if self._of(transport) != self._run:
            return False  # another trainer's, or another way
        self._meet(transport)
        return True

    def fetch(self, blob: Blob) -> Tensor:
        if self._link is None:
            raise ConfigError("the link to the training ranks is not open")
        if len(self._memory) < blob.bytes:
            self._memory = torch.empty(blob.bytes, dtype=torch.uint8, device=self._device)
        memory, source = self._memory[: blob.bytes], blob.where["source"]
        try:
            deadline = time.monotonic() + self._timeout_s
            self._link.receive([(source, memory)], blob.where["index"], deadline)
        except RuntimeError as error:
            # At once: a kernel that waits for the sender would keep the GPU from all else.
            self._hang_up()
            raise ConfigError(
                f"training rank {source} did not send {blob.bytes / 1e6:.1f} MB within "
                f"{self._timeout_s:g} s: {_gist(error)}"
            ) from None
        self._link.moved[source] += 1
        return memory

    def report(self, receipt: Receipt) -> None:
        try:
            assert self._store is not None, "a session is on"
            content = msgspec.json.encode(receipt).decode()
            self._store.set(_receipt(receipt.session, receipt.rank), content)
        except RuntimeError as error:
            raise ConfigError(f"the trainer's store is gone: {_gist(error)}") from None

    def close(self) -> None:
        self._hang_up()
        # The sockets close with the last reference.
        del self._store, self._memory

    def _meet(self, transport: dict[str, Any]) -> None:
        host, port, wait_s = (transport[x] for x in ("host", "port", "connect_timeout_s"))
        try:
            if self._store is None:
                self._store = join_store(host, port, wait_s)
            meeting = Meeting(transport, self._store)
            rank, tp = transport["senders"] + self._rank, meeting.size()
            old_link, self._link = self._link, None
            self._link = agreed_link(meeting, old_link, rank=rank, tp=tp, device=self._device)
        except Refused as error:
            raise ConfigError(str(error)) from None
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"engine rank {self._rank} could not meet the training ranks at {host}:{port} "
                f"within {wait_s:g} s: {_gist(error)}"
            ) from None

    def _hang_up(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.abort()

    def _of(self, transport: Mapping[str, Any]) -> list:
        """Return a sender's identity, of whatever kind, from its description."""
        names = ("kind", "host", "port", "run", "engine", "backend", "senders")
        return [transport.get(name) for name in names]


def _listen(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0), backlog=1024)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # Python adds the address
        raise ConfigError(
            f"training rank 0 cannot listen at {host!r} for engines ({reason}); set sync.host to "
            "an address of its own machine that they reach, as `ip address` shows them there"
        ) from None


def _receipt(session: str, rank: int) -> str:
    return f"receipt/{session}/{rank}"


def _gist(error: Exception) -> str:
    """The cause without the place in torch's source and its stack."""
    line = str(error).partition("\n")[0]
    return line.partition("] ")[2] if line.startswith("[") else line
