"""Publish the policy's weights as one new version: every rank quantizes and sends its own shard.

While the engines load one bucket, the ranks quantize the next; no more than two are in memory.
"""

import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from qurl_megatron.actor.aligned import Align
from qurl_megatron.actor.megatron import everywhere, held, on_lead, share
from qurl_megatron.actor.policy import Policy
from qurl_megatron.config import QuantConfig, RolloutConfig, SyncConfig
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.fleet.fleet import EngineRecord, Fleet
from qurl_megatron.kit.clock import now
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.place import address_for_others
from qurl_megatron.observe.metrics import Max, Metric, Sum
from qurl_megatron.observe.timeline import Span, Timeline
from qurl_megatron.publish.drift import Drift
from qurl_megatron.publish.shards import RankShards
from qurl_megatron.publish.update import BlobsFor, Update
from qurl_megatron.wire import SLOTS
from qurl_megatron.wire.lease import Owner
from qurl_megatron.wire.message import Blob, encoded
from qurl_megatron.wire.session import TRANSPORTS
from qurl_megatron.wire.transport import Failures, Place, Sender, Site

MIB = 2**20

Blobs = dict[Place, Blob]
"""One training rank's part of a bucket, by the engines it is for."""


def make_sender(sync: SyncConfig, rollout: RolloutConfig, policy: Policy, run_dir: Path) -> Sender:
    """Open this rank's end of the transport that ``sync`` asks for; all ranks call it together.

    Raises:
        ConfigError: the transport cannot reach these engines; names the key and the fix.
    """
    ranks = policy.ranks
    host = address_for_others(one_node=False) if rollout.each_node else socket.gethostname()
    hosts = everywhere(host)
    one_machine = len(set(hosts)) == 1 and not rollout.urls and not rollout.rendezvous
    shared = partial(share, waiting_for="opening the transport")
    parameters = sum(p.numel() for p in policy.gpt.parameters())
    bucket = min(int(sync.bucket_mb * MIB), 4 * parameters)
    # Containers often have only 64 MB there.
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    room = ranks.device.type == "cuda" or free > SLOTS * ranks.world_size * bucket
    token = None
    if ranks.leads:
        run_dir.mkdir(parents=True, exist_ok=True)
        token = Owner.of(run_dir).token
    even = rollout.each_node and len(set(Counter(hosts).values())) == 1
    # Pipeline stages differ in size, so the leading rank's room decides for all.
    kind = choose(sync, one_machine=one_machine, room=shared(room), relayed=even)
    return TRANSPORTS[kind].sender.open(
        Site(
            rank=ranks.rank,
            size=ranks.world_size,
            leads=ranks.leads,
            device=ranks.device,
            name=f"pp{ranks.pipeline.rank}-tp{ranks.tensor.rank}-copy{ranks.copies.rank}",
            run_dir=run_dir,
            token=shared(token),
            one_machine=one_machine,
            hosts=hosts,
            share=shared,
            shared=sync.dir,
            host=sync.host,
            timeout_s=rollout.update_timeout_s,
        )
    )


def choose(sync: SyncConfig, *, one_machine: bool, room: bool = True, relayed: bool = False) -> str:
    """Return the name of the transport to use.

    Args:
        one_machine: all ranks and engines are on one machine.
        room: the machine's shared memory has room for the buckets of all ranks.
        relayed: engines are on all of the trainer's machines, which have equally many ranks.

    Raises:
        ConfigError: the requested transport cannot reach the engines.
    """
    if sync.transport == "auto":
        if not room or not (one_machine or relayed):
            return "files"
        return sync.chosen(each_node=relayed)
    if TRANSPORTS[sync.transport].sender.one_machine and not one_machine:
        raise ConfigError(
            f"sync.transport={sync.transport} needs trainer and engines on one machine, and "
            "engines that the run starts itself; use group, or files with sync.dir on a shared "
            "filesystem"
        )
    return sync.transport


@dataclass
class _Spent:
    """Time and bytes of one version on this rank."""

    quantize_s: float = 0.0
    put_s: float = 0.0
    send_s: float = 0.0  # put, and waiting for the others and for the engines
    bytes: int = 0
    largest: int = 0  # bytes of the largest bucket
    filled: float = 0.0  # performance counter when the last bucket was put


class Publisher:
    """All ranks make one and call it together. As a context manager it closes the sender."""

    def __init__(
        self,
        policy: Policy,
        fleet: Fleet | None,
        quant: QuantConfig,
        sync: SyncConfig,
        sender: Sender,
        *,
        seed: int = 0,
        stage: bool = False,
        timeline: Timeline | None = None,
    ) -> None:
        """
        Args:
            fleet: the engines, on the leading rank; None on the others.
            sender: this rank's end of the transport.
            seed: the run's, for the draws of ``quant.rounding``.
            stage: engines load when all buckets are written, instead of bucket by bucket. Those
                that generate meanwhile are paused for less time, and publishing takes longer.
            timeline: gets a span per update, on the leading rank.
        """
        assert not stage or sender.lasting, "later buckets overwrite earlier ones"
        self.policy, self.fleet, self.sync, self.sender = policy, fleet, sync, sender
        self.stage, self.timeline = stage, timeline
        self._update: Update  # on the leading rank
        self._loaded: dict[str, Metric] = {}  # on the leading rank: metrics of ``Update.commit``
        self._drift = Drift(quant)
        limit = int(sync.bucket_mb * MIB) // sender.machines
        self._shards = RankShards(policy, quant, limit, seed)

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *exception: object) -> None:
        self.sender.close()

    def publish(self, version: int) -> dict[str, Metric]:
        """Quantize, send and load ``version`` everywhere; all ranks call it together.

        Returns:
            This rank's metrics: quantization, time and bytes.

        Raises:
            EngineError: no engine confirmed the version; none serves part of it.
            ConfigError: a rank could not write, or has weights that cannot be quantized.
        """
        spent = _Spent()
        with ExitStack() as publication:
            engines = self._agree(
                partial(self.sender.begin, version), partial(self._begin, version, publication)
            )
            failures = self.sender.connect(engines)
            for index in range(self._shards.rounds):
                fill = partial(self._fill, index, version, engines, failures, spent)
                alive = self._agree(fill, self._load)
                self._drop_lost(engines, alive)
                engines, failures = alive, {}
                self.sender.deliver(index)
                spent.send_s += time.perf_counter() - spent.filled
            served = self._agree(self.sender.settle, self._commit)
            self._drop_lost(engines, served)
        self.sender.finish()
        return {
            **self._drift.metrics(),
            **self._loaded,
            "sync/quantize_s": Max(spent.quantize_s),
            "sync/put_s": Max(spent.put_s),
            "sync/send_s": Max(spent.send_s),
            "sync/bytes": Sum(spent.bytes),
            "sync/buffer_mb": Max(2 * spent.largest / MIB),
        }

    def _agree(self, make: Callable[[], Any], act: Callable[[list], Any]) -> Any:
        """Call ``make`` on every rank, then ``act`` on the leading one; return its result on all.

        Raises:
            EngineError, ConfigError: the first rank's error of ``make``, or that of ``act``; raised
                on every rank.
        """
        try:
            outcome = make()
        except ConfigError as error:  # the others count on this rank
            outcome = error
        ranks = self.policy.ranks
        gathered: list = [None] * ranks.world_size
        dist.gather_object(outcome, gathered if ranks.leads else None)

        def acted() -> Any:
            for part in gathered:
                if isinstance(part, ConfigError):
                    raise part
            return act(gathered)

        return on_lead(acted, ranks, waiting_for="publishing")

    # What the leading rank does between the ranks' rounds. Each function returns the tensor sizes
    # of the engines that are left, by name.

    def _begin(self, version: int, publication: ExitStack, _: list) -> dict[str, int]:
        fleet = held(self.fleet)
        engines = publication.enter_context(fleet.publication())
        if align := self.policy.align:
            refuse_unlike(align, fleet.config.backend, engines)
        self._update = publication.enter_context(
            Update(fleet, engines, version, self.sync, self.sender.describe, stage=self.stage)
        )
        if self.sender.cut:
            refuse_whole_experts(engines)
            self._update.begin()  # an engine that fails to pause must not stand in a chain
        sizes = self._update.sizes
        self._update.turns = self.sender.arrange(sizes)
        if self.sender.cut:
            self._update.connect()
        return sizes

    def _load(self, parts: list[tuple[Blobs, Failures]]) -> dict[str, int]:
        self._update.drop(failures for _, failures in parts)
        self._update.bucket(_blobs_for([blobs for blobs, _ in parts]))
        return self._update.sizes

    def _commit(self, failures: list[Failures]) -> dict[str, int]:
        self._update.drop(failures)
        self._loaded = self._update.commit(self.sender.receipts)
        if self.timeline:
            end, paused_s = now(), self._loaded["sync/paused_s"].value
            span = Span("update", "publish", self._update.version, end - paused_s, end)
            self.timeline.add(span)
        return self._update.sizes

    def _drop_lost(self, engines: Mapping[str, int], alive: Mapping[str, int]) -> None:
        for engine in engines.keys() - alive.keys():
            self.sender.drop(engine)

    def _fill(
        self,
        index: int,
        version: int,
        engines: Mapping[str, int],
        failures: Failures,
        spent: _Spent,
    ) -> tuple[Blobs, Failures]:
        """Quantize this rank's bucket of one round and put it where the engines can fetch it.

        Args:
            failures: engines that this rank could not reach; returned with the blobs.

        Raises:
            ConfigError: a weight cannot be quantized, or there is no room for the bucket.
        """
        start = time.perf_counter()
        try:
            shards = self._shards.quantized(index, version, self.sender.room(index), self._drift)
        except ConfigError:
            self.sender.miss()
            raise
        quantized = time.perf_counter()
        blobs: Blobs = {}
        if not self.sender.cut:
            blobs.update(self.sender.put_everywhere(index, shards))
        else:
            for tp in sorted(set(engines.values())):
                for rank in range(tp):
                    parts = self._shards.cut(shards, tp, rank)
                    blobs[tp, rank] = self.sender.put(index, parts, to=(tp, rank))
        spent.filled = time.perf_counter()
        spent.quantize_s += quantized - start
        spent.put_s += spent.filled - quantized
        spent.send_s += spent.filled - quantized
        for blob in blobs.values():
            spent.bytes += sum(piece.bytes for piece in blob.pieces)
        spent.largest = max(spent.largest, sum(blob.bytes for blob in blobs.values()))
        return blobs, failures


def refuse_unlike(align: Align, backend: str, engines: Sequence[EngineRecord]) -> None:
    """Raise ConfigError if the policy quantizes tokens in another way than these engines."""
    if not align.activations:
        return
    for engine in engines:
        if (engine.kind.name, engine.tp) != (backend, align.engine_tensor):
            raise ConfigError(
                f"train.align=full computes as rollout.backend={backend} with "
                f"rollout.engine_tensor={align.engine_tensor} does, and {engine} is "
                f"{engine.kind.name} with a tensor size of {engine.tp}; set both keys to what the "
                "engines are, or train.align=weights"
            )


def refuse_whole_experts(engines: Sequence[EngineRecord]) -> None:
    """Raise ConfigError if engine ranks hold whole experts: a ``cut`` transport cuts each one."""
    for engine in engines:
        if engine.ep > 1:
            raise ConfigError(
                f"sync.transport=group cuts every expert over an engine's ranks, and {engine} "
                f"divides them whole, by its ep_size = {engine.ep}; start it without --ep-size, or "
                "set sync.transport to memory, files or relay"
            )


def _blobs_for(parts: Sequence[Blobs]) -> BlobsFor:
    """Return all training ranks' blobs by engine rank."""
    by_place: dict[Place, list[Blob]] = {}
    for blobs in parts:
        for to, blob in blobs.items():
            of_place = by_place.setdefault(to, [])
            if blob.pieces:
                of_place.append(blob)

    encodings = {to: encoded(blobs) for to, blobs in by_place.items()}

    def blobs_for(engine: EngineRecord, rank: int) -> bytes:
        for place in (None, engine.host, (engine.tp, rank)):
            if place in encodings:
                return encodings[place]
        raise EngineError(f"{engine.url} is on none of the trainer's machines")

    return blobs_for
