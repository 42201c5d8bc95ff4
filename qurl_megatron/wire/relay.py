"""Buckets for engines on all of the trainer's machines: each byte comes to a machine once.

All machines have the same number of training ranks. The first ranks of all machines are *peers*,
and so are the second ones, and so on. For each bucket, peers exchange the codes and scales they
have quantized. Each lays them out in memory that the engines of its machine map
(``shared_memory``), with its own part first, so that it is made in place. Checksums stay those of
the rank that quantized. Receipts come back through a store on the leading rank.
"""

import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.wire import SLOTS
from qurl_megatron.wire.link import CONNECT_S, LinkError
from qurl_megatron.wire.message import Blob, Receipt, aligned, fill, lay_out
from qurl_megatron.wire.shared_memory import MemoryReceiver, MemorySender, memory_folder
from qurl_megatron.wire.store import gist, join_store, leave_in, store_of, take_from
from qurl_megatron.wire.transport import Place, Site


class RelaySender(MemorySender):
    kind = "relay"
    one_machine = False

    def __init__(self, site: Site, store: dist.TCPStore) -> None:
        """All training ranks call it together.

        Raises:
            ConfigError: the machines have different numbers of ranks; or as ``MemorySender``.
        """
        peers_by_place = peers(site.hosts)
        self._limit_s = site.timeout_s
        wait = timedelta(seconds=site.timeout_s)
        groups = [dist.new_group(ranks, timeout=wait) for ranks in peers_by_place]
        place = next(n for n, ranks in enumerate(peers_by_place) if site.rank in ranks)
        self._peers, self._group = peers_by_place[place], groups[place]
        self._machine = self._peers.index(site.rank)
        self.machines = len(self._peers)
        self._hosts = [site.hosts[rank] for rank in self._peers]
        self._store, self._run = store, secrets.token_hex(4)
        # Containers of one host, each a machine of its own here, may share /dev/shm.
        token = f"{site.token}-machine{self._machine}"
        if place == 0:
            shutil.rmtree(memory_folder(token), ignore_errors=True)  # files of a killed run
        dist.barrier()
        super().__init__(token, site.rank, leads=place == 0, device=site.device)

    @classmethod
    def open(cls, site: Site) -> "RelaySender":
        return cls(site, store_of(site, site.hosts[0]))

    def describe(self, engine: str, ranks: int) -> dict[str, Any]:
        store = {"host": self._store.host, "port": self._store.port, "run": self._run}
        return {**super().describe(engine, ranks), **store}

    def put_everywhere(self, index: int, parts: Sequence[Shard]) -> dict[Place, Blob]:
        planned, size = lay_out(parts)
        sizes = self._gather(size)
        if None in sizes:
            return {}  # a peer has missed it, and says why
        starts, total = layout(sizes, self._machine)
        slot = self._slots[index % SLOTS]
        address, failure = None, None
        try:
            memory = slot.of(total)
            address = slot.where
        except ConfigError as error:  # peers wait for this rank
            failure = error
        slots = self._gather(address)
        if failure is not None:
            raise failure
        if None in slots:
            return {}
        pieces = fill(memory[:size], planned, [part.value for part in parts])
        self._exchange(memory, starts, sizes)
        blobs: dict[Place, Blob] = {}
        for machine, host in enumerate(self._hosts):
            start = layout(sizes, machine)[0][self._machine]
            blobs[host] = Blob({"slot": slots[machine], "start": start}, size, pieces)
        return blobs

    def miss(self) -> None:
        self._gather(None)

    def take_receipt(self, name: str) -> bytes | None:
        return take_from(self._store, name)

    def _gather(self, value: Any) -> list:
        values: list = [None] * len(self._peers)
        with self._from_peers():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def _exchange(self, memory: Tensor, starts: Sequence[int], sizes: Sequence[int]) -> None:
        """Send the part of this rank to its peers, and receive theirs."""
        own_part = memory[: sizes[self._machine]]
        receives, sends = [], []
        for machine, (peer, start, size) in enumerate(zip(self._peers, starts, sizes, strict=True)):
            if machine == self._machine:
                continue
            if size:
                part = memory[start : start + size]
                receives.append(dist.P2POp(dist.irecv, part, peer, self._group))
            if len(own_part):
                sends.append(dist.P2POp(dist.isend, own_part, peer, self._group))
        # Receives first: gloo queues the permission for a peer to send behind its own sends.
        moves = [*receives, *sends]
        with self._from_peers():
            for work in dist.batch_isend_irecv(moves) if moves else ():
                work.wait()
            if memory.is_cuda:
                torch.cuda.current_stream(memory.device).synchronize()  # engines will not

    @contextmanager
    def _from_peers(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            other_hosts = [host for host in self._hosts if host != self._hosts[self._machine]]
            raise LinkError(
                f"a training rank on {' or '.join(other_hosts)} is gone, or gave no part of this "
                f"version within {self._limit_s:g} s (rollout.update_timeout_s): {gist(error)}"
            ) from error


class RelayReceiver(MemoryReceiver):
    def __init__(self, transport: dict[str, Any], rank: int) -> None:
        super().__init__(transport, rank)
        host, port = transport["host"], transport["port"]
        try:
            self._store = join_store(host, port, CONNECT_S["cpu"])
        except RuntimeError as error:
            raise ConfigError(
                f"the trainer's store at {host}:{port} is not there: {error}"
            ) from None

    def fetch(self, blob: Blob) -> Tensor:
        start = blob.where["start"]
        return super().fetch(Blob(blob.where["slot"], start + blob.bytes, ()))[start:]

    def report(self, receipt: Receipt) -> None:
        leave_in(self._store, receipt)


def peers(hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks that are peers, one of each machine, place by place.

    Args:
        hosts: of each training rank.

    Raises:
        ConfigError: the machines have different numbers of ranks.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    counts = [f"{host} has {len(ranks)}" for host, ranks in by_host.items()]
    if len({len(ranks) for ranks in by_host.values()}) > 1:
        raise ConfigError(
            "sync.transport=relay needs the same number of training ranks on each machine: "
            f"{', '.join(counts)}; set sync.transport=files"
        )
    return [list(ranks) for ranks in zip(*by_host.values(), strict=True)]


def layout(sizes: Sequence[int], machine: int) -> tuple[list[int], int]:
    """Return where each machine's part begins in a slot of ``machine``, and the slot's bytes."""
    starts, end = [0] * len(sizes), aligned(sizes[machine])
    for other, size in enumerate(sizes):
        if other != machine:
            starts[other] = end
            end += aligned(size)
    return starts, end
