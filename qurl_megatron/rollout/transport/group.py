"""Buckets from point to point, over gloo or NCCL, cut to what each engine rank keeps.

Each engine has a process group of its own with all training ranks (first) and its tensor ranks
(after them), so what befalls one engine stays between the trainer and it. The groups are built on a
TCP store that the leading training rank hosts; receipts come back through it. Neither side needs a
default group, and none that it has is touched.

Whatever a peer does, die or only stop, every wait ends within its timeout.

Nothing here is encrypted or authenticated, as with all of gloo and NCCL: bind the store to an
address that only the cluster reaches.
"""

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.errors import ConfigError
from qurl_megatron.rollout.transport import Failures, Part, Rank
from qurl_megatron.rollout.transport.memory import SLOTS
from qurl_megatron.rollout.transport.receipts import missing
from qurl_megatron.rollout.wire import Blob, Receipt, fill, lay_out

POLL_S = 0.001


def host_store(host: str, timeout_s: float) -> dist.TCPStore:
    """The leading rank's meeting point, on a free port of the address ``host`` and no other."""
    listener = socket.create_server((host, 0), backlog=1024)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """A connection to it; each holds one wait at a time, so whoever waits needs one of his own."""
    return dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


@dataclass
class _Link:
    """The way to one engine."""

    group: dist.ProcessGroup
    tp: int
    sending: dict[int, list[dist.Work]] = field(default_factory=dict)  # by bucket
    deadline: dict[int, float] = field(default_factory=dict)


class GroupSender:
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
        connect_timeout_s: float = 30.0,
        receipt_wait_s: float = 2.0,
    ) -> None:
        """
        Args:
            store: ``host_store`` on rank 0, ``join_store`` to that on the others.
            rank, size: of all training ranks.
            device: where the weights are; decides between gloo and NCCL.
            timeout_s: an engine that has not taken a bucket by then is dropped.
            connect_timeout_s: one that has not come to its group by then, likewise.
        """
        self.store, self.rank, self.size = store, rank, size
        self.device = torch.device(device)
        self.timeout_s, self.connect_timeout_s = timeout_s, connect_timeout_s
        self.receipt_wait_s = receipt_wait_s
        self._updates = 0  # begun; all ranks count alike, so it makes names that all know
        self._links: dict[str, _Link] = {}
        self._failures: Failures = {}
        self._memory: dict[tuple[int, Rank], Tensor] = {}  # by slot
        self._ready: dict[int, dict[Rank, Tensor]] = {}  # what was put, by bucket

    def describe(self, engine: str) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "backend": "nccl" if self.device.type == "cuda" else "gloo",
            "host": self.store.host,
            "port": self.store.port,
            "prefix": self._prefix(engine),
            "senders": self.size,
            "timeout_s": self.timeout_s,
            "connect_timeout_s": self.connect_timeout_s,
        }

    def begin(self, version: int) -> None:
        self._hang_up()
        self._updates += 1

    def connect(self, engines: Mapping[str, int]) -> Failures:
        new = {engine: tp for engine, tp in engines.items() if engine not in self._links}
        if new:
            with ThreadPoolExecutor(len(new)) as pool:  # who does not come keeps nobody waiting
                links = list(pool.map(self._connect, new.keys(), new.values()))
            for engine, link in zip(new, links, strict=True):
                if isinstance(link, _Link):
                    self._links[engine] = link
                else:
                    self._failures[engine] = link
        return {engine: self._failures[engine] for engine in new if engine in self._failures}

    def put(self, index: int, parts: Sequence[Part], *, to: Rank | None = None) -> Blob:
        assert to is not None, "each engine rank gets blobs of its own"
        self._await(index - SLOTS)
        pieces, size = lay_out(parts)
        slot = index % SLOTS, to
        if slot not in self._memory or len(self._memory[slot]) < size:
            self._memory[slot] = torch.empty(size, dtype=torch.uint8, device=self.device)
        memory = self._memory[slot][:size]
        pieces = fill(memory, pieces, [tensor for _, tensor, _, _ in parts])
        if pieces:  # nobody waits for an empty blob
            self._ready.setdefault(index, {})[to] = memory
        return Blob({"source": self.rank, "index": index}, size, pieces)

    def deliver(self, index: int) -> None:
        ready = self._ready.pop(index, {})
        for engine, link in list(self._links.items()):
            link.deadline[index] = time.monotonic() + self.timeout_s
            with self._dropping(engine):
                link.sending[index] = [
                    link.group.send([memory], self.size + rank, index)
                    for (tp, rank), memory in sorted(ready.items(), key=lambda item: item[0])
                    if tp == link.tp
                ]

    def settle(self) -> Failures:
        for index in sorted({i for link in self._links.values() for i in link.sending}):
            self._await(index)
        return dict(self._failures)

    def drop(self, engine: str) -> None:
        link = self._links.pop(engine, None)
        if link is not None:
            link.sending.clear()
            link.group.abort()

    def receipts(self, session: str, ranks: int) -> list[Receipt]:
        deadline = time.monotonic() + self.receipt_wait_s
        found = []
        for rank in range(ranks):
            key = _receipt(session, rank)
            while not (there := self.store.check([key])) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            found.append(
                Receipt.from_json(self.store.get(key).decode()) if there else missing(session, rank)
            )
            self.store.delete_key(key)
        return found

    def finish(self, *, keep: int) -> None:
        self._hang_up()

    def close(self) -> None:
        self._hang_up()
        self._memory.clear()

    def _prefix(self, engine: str) -> str:
        return f"update-{self._updates}/{engine}"

    def _connect(self, engine: str, tp: int) -> _Link | str:
        """The link, or why there is none."""
        about = self.describe(engine)
        try:
            store = join_store(about["host"], about["port"], self.connect_timeout_s)
            if self.rank == 0:
                store.set(_size(about["prefix"]), str(self.size + tp))
            return _Link(_group(about, store, self.rank, self.size + tp), tp)
        except (RuntimeError, OSError) as error:  # torch tells most that can go wrong on the way so
            return (
                f"training rank {self.rank} could not reach its {tp} ranks within "
                f"{self.connect_timeout_s:g} s: {_gist(error)}"
            )

    def _await(self, index: int) -> None:
        """Until all engines have what was delivered for ``index``, or are dropped."""
        for engine, link in list(self._links.items()):
            with self._dropping(engine):
                for work in link.sending.pop(index, ()):
                    _finish(work, link.deadline[index], self.device)

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

    def _hang_up(self) -> None:
        for engine in list(self._links):
            self.drop(engine)
        self._failures.clear()
        self._ready.clear()


class GroupReceiver:
    def __init__(self, transport: dict[str, Any], rank: int) -> None:
        """
        Raises:
            ConfigError: the training ranks cannot be reached, or do not come in time.
        """
        self._timeout_s = transport["timeout_s"]
        self._device = torch.device("cpu")
        if transport["backend"] == "nccl":
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._memory = torch.empty(0, dtype=torch.uint8, device=self._device)
        host, port, wait_s = (transport[x] for x in ("host", "port", "connect_timeout_s"))
        try:
            self._store = join_store(host, port, wait_s)
            size = int(self._store.get(_size(transport["prefix"])))
            self._group = _group(transport, self._store, transport["senders"] + rank, size)
        except RuntimeError as error:
            raise ConfigError(
                f"engine rank {rank} could not meet the training ranks at {host}:{port} within "
                f"{wait_s:g} s: {_gist(error)}"
            ) from None

    def fetch(self, blob: Blob) -> Tensor:
        if len(self._memory) < blob.bytes:
            self._memory = torch.empty(blob.bytes, dtype=torch.uint8, device=self._device)
        memory, source = self._memory[: blob.bytes], blob.where["source"]
        try:
            work = self._group.recv([memory], source, blob.where["index"])
            _finish(work, time.monotonic() + self._timeout_s, self._device)
        except RuntimeError as error:
            raise ConfigError(
                f"training rank {source} did not send {blob.bytes / 1e6:.1f} MB within "
                f"{self._timeout_s:g} s: {_gist(error)}"
            ) from None
        return memory

    def report(self, receipt: Receipt) -> None:
        try:
            self._store.set(_receipt(receipt.session, receipt.rank), receipt.to_json())
        except RuntimeError as error:
            raise ConfigError(f"the trainer's store is gone: {_gist(error)}") from None

    def close(self) -> None:
        self._group.abort()
        # The sockets close with the last reference.
        del self._group, self._store, self._memory


def _group(
    about: Mapping[str, Any], store: dist.TCPStore, rank: int, size: int
) -> dist.ProcessGroup:
    prefixed = dist.PrefixStore(about["prefix"], store)
    if about["backend"] == "nccl":
        return _nccl_group(prefixed, rank, size)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=about["connect_timeout_s"])
    # By itself gloo listens where this machine's name points to, which may be nowhere.
    own = _own_address(about["host"], about["port"])
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
    return dist.ProcessGroupGloo(prefixed, rank, size, options)


def _nccl_group(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    """NCCL connects two ranks when they first send; ``_finish`` keeps the time, not NCCL."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)
    # Read when the group is made. The default ends this process when a peer dies.
    key = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(key)
    os.environ[key] = "0"
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before


def _finish(work: dist.Work, deadline: float, device: torch.device) -> None:
    """Wait until bytes are sent or here.

    Raises:
        RuntimeError: the peer is gone, or the deadline is past.
    """
    left_s = max(deadline - time.monotonic(), 0.001)  # gloo takes 0 for "forever"
    if device.type == "cpu":
        work.wait(timedelta(seconds=left_s))
        return
    # NCCL's own wait only makes the stream wait.
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError("timed out")
        time.sleep(POLL_S)
    work.wait()


def _own_address(host: str, port: int) -> str:
    """This machine's address on the way to ``host``; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def _size(prefix: str) -> str:
    return f"size/{prefix}"


def _receipt(session: str, rank: int) -> str:
    return f"receipt/{session}/{rank}"


def _gist(error: RuntimeError) -> str:
    """The cause without the place in torch's source and its stack."""
    line = str(error).splitlines()[0]
    return line.partition("] ")[2] if line.startswith("[") else line
