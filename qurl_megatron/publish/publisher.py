"""Publish the policy's weights as one new version: every rank quantizes and sends its own shard.

While the engines load one bucket, the ranks quantize the next; no more than two are in memory.
"""

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from qurl_megatron.fleet.fleet import EngineRecord, Fleet
from qurl_megatron.kit.clock import now
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.metrics import Max, Metric, Sum
from qurl_megatron.observe.timeline import Span, Timeline
from qurl_megatron.publish.drift import Drift
from qurl_megatron.publish.shards import RankShards
from qurl_megatron.publish.update import BlobsFor, Update
from qurl_megatron.wire import SLOTS
from qurl_megatron.wire.lease import Owner
from qurl_megatron.wire.message import Blob, encoded
from qurl_megatron.wire.session import TRANSPORTS
from qurl_megatron.wire.transport import Failures, Rank, Sender, Site

MIB = 2**20

Blobs = dict[Rank | None, Blob]
"""One training rank's part of a bucket, by the engine rank it is for; None: for all of them."""


def make_sender(sync: SyncConfig, rollout: RolloutConfig, policy: Policy, run_dir: Path) -> Sender:
    """Open this rank's end of the transport that ``sync`` asks for; all ranks call it together.

    Raises:
        ConfigError: the transport cannot reach these engines; names the key and the fix.
    """
    ranks = policy.ranks
    hosts = everywhere(socket.gethostname())
    one_machine = len(set(hosts)) == 1 and not rollout.urls and not rollout.rendezvous
    shared = partial(share, waiting_for="opening the transport")
    parameters = sum(p.numel() for p in policy.gpt.parameters())
    bucket = min(int(sync.bucket_mb * MIB), 4 * parameters)
    room = ranks.device.type == "cuda" or _shm_free() > SLOTS * ranks.world_size * bucket
    token = None
    if ranks.leads:
        run_dir.mkdir(parents=True, exist_ok=True)
        token = Owner.of(run_dir).token
    # Stages differ in size: one rank's answer holds for all.
    transport = TRANSPORTS[choose(sync, one_machine=one_machine, room=shared(room))]
    return transport.sender.open(
        Site(
            rank=ranks.rank,
            size=ranks.world_size,
            leads=ranks.leads,
            device=ranks.device,
            name=f"pp{ranks.pipeline.rank}-tp{ranks.tensor.rank}-copy{ranks.copies.rank}",
            run_dir=run_dir,
            token=shared(token),
            one_machine=one_machine,
            bytes=4 * parameters * ranks.tensor.size * ranks.pipeline.size,
            share=shared,
            shared=sync.dir,
            host=sync.host,
            receipt_wait_s=sync.receipt_wait_s,
            timeout_s=rollout.update_timeout_s,
        )
    )


def choose(sync: SyncConfig, *, one_machine: bool, room: bool = True) -> str:
    """Return the name of the transport for engines here, or elsewhere.

    Args:
        room: the machine's shared memory has room for the buckets of all ranks.

    Raises:
        ConfigError: the requested one cannot reach them.
    """
    if sync.transport == "auto":
        return sync.on_one_machine if one_machine and room else "files"
    if TRANSPORTS[sync.transport].sender.one_machine and not one_machine:
        raise ConfigError(
            f"sync.transport={sync.transport} needs trainer and engines on one machine, and "
            "engines that the run starts itself; use group, or files with sync.dir on a shared "
            "filesystem"
        )
    return sync.transport


def _shm_free() -> int:
    """Bytes free in /dev/shm; containers often have 64 MB."""
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0


@dataclass
class _Spent:
    """Time and bytes of one version on this rank."""

    quantize_s: float = 0.0
    put_s: float = 0.0
    send_s: float = 0.0  # put, and waiting for the others and for the engines
    bytes: int = 0
    largest: int = 0  # bytes of the largest bucket
    filled: float = 0.0  # when the last bucket was put, of the performance counter


class Publisher:
    """All ranks make one and call it together. Leaving it as a context closes the sender."""

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
            stage: load when everything is written instead of bucket by bucket: engines that
                generate meanwhile are paused for a shorter time, and publishing takes longer.
            timeline: gets a span per update, on the leading rank.
        """
        assert not stage or sender.lasting, "a bucket is gone with the next"
        self.policy, self.fleet, self.sync, self.sender = policy, fleet, sync, sender
        self.stage, self.timeline = stage, timeline
        self._drift = Drift(quant)
        self._shards = RankShards(policy, quant, quant.scheme, int(sync.bucket_mb * MIB), seed)

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *exception: object) -> None:
        self.sender.close()

    def publish(self, version: int) -> dict[str, Metric]:
        """Quantize, send and load ``version`` everywhere; all ranks call it together.

        Returns:
            This rank's metrics: quantization, time and bytes.

        Raises:
            EngineError: no engine confirmed the version; none serves a part of it.
            ConfigError: a rank could not write, or has weights that cannot be quantized.
        """
        spent = _Spent()
        with ExitStack() as stack:
            lead = _Lead(self, self.fleet, version, stack) if self.fleet else None
            begin = partial(self.sender.begin, version)
            engines = self._agree(begin, lead, _Lead.begin)
            failures = self.sender.connect(engines)
            for index in range(self._shards.rounds):
                fill = partial(self._fill, index, version, engines, failures, spent)
                alive = self._agree(fill, lead, _Lead.load)
                engines, failures = self._without(engines, alive), {}
                self.sender.deliver(index)
                spent.send_s += time.perf_counter() - spent.filled
            served = self._agree(self.sender.settle, lead, _Lead.commit)
            self._without(engines, served)
        self.sender.finish()
        return {
            **self._drift.metrics(),
            **(lead.metrics if lead else {}),
            "sync/quantize_s": Max(spent.quantize_s),
            "sync/put_s": Max(spent.put_s),
            "sync/send_s": Max(spent.send_s),
            "sync/bytes": Sum(spent.bytes),
            "sync/buffer_mb": Max(2 * spent.largest / MIB),
        }

    def _agree(
        self, make: Callable[[], Any], lead: "_Lead | None", act: Callable[["_Lead", list], Any]
    ) -> Any:
        """Make every rank's part, and return the leading rank's result on every rank.

        Raises:
            EngineError, ConfigError: a rank's first error, or the one of ``act``; on every rank.
        """
        try:
            outcome = make()
        except ConfigError as error:  # the others count on this rank
            outcome = error
        gathered: list = [None] * self.policy.ranks.world_size
        dist.gather_object(outcome, gathered if lead else None)

        def acted() -> Any:
            for part in gathered:
                if isinstance(part, ConfigError):
                    raise part
            return act(held(lead), gathered)

        return on_lead(acted, self.policy.ranks, waiting_for="publishing")

    def _without(self, engines: Mapping[str, int], alive: Mapping[str, int]) -> Mapping[str, int]:
        """Drop the engines that are not alive; return the others."""
        for engine in engines.keys() - alive.keys():
            self.sender.drop(engine)
        return alive

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
            failures: engines that this rank could not reach meanwhile, handed through.

        Raises:
            ConfigError: a weight cannot be quantized, or there is no room for the bucket.
        """
        start = time.perf_counter()
        shards = self._shards.quantized(index, version, self.sender.room(index), self._drift)
        quantized = time.perf_counter()
        blobs: Blobs = {}
        if not self.sender.cut:
            blobs[None] = self.sender.put(index, shards)
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


class _Lead:
    """The leading rank's part of one version, between the ranks' rounds."""

    def __init__(self, publisher: Publisher, fleet: Fleet, version: int, stack: ExitStack) -> None:
        self.publisher, self.fleet, self.version, self.stack = publisher, fleet, version, stack
        self.metrics: dict[str, Metric] = {}
        self._staged: list[BlobsFor] = []

    def begin(self, begun: list) -> dict[str, int]:
        """Return the engines that are to take the version, with their tensor sizes."""
        publisher, fleet = self.publisher, self.fleet
        engines = self.stack.enter_context(fleet.publication())
        if align := publisher.policy.align:
            refuse_unlike(align, fleet.config.backend, engines)
        self._update = self.stack.enter_context(
            Update(fleet, engines, self.version, publisher.sync, publisher.sender.describe)
        )
        if publisher.sender.cut:
            self._update.connect()
        return self._update.sizes

    def load(self, parts: list[tuple[Blobs, Failures]]) -> dict[str, int]:
        """Have the engines load one round; return those that are left, with their tensor sizes."""
        self._drop(failures for _, failures in parts)
        blobs_for = _blobs_for([blobs for blobs, _ in parts])
        if self.publisher.stage:
            self._staged.append(blobs_for)
        else:
            self._update.bucket(blobs_for)
        return self._update.sizes

    def commit(self, failures: list[Failures]) -> dict[str, int]:
        """Have the engines serve the version; return those that do, with their tensor sizes."""
        self._drop(failures)
        for blobs_for in self._staged:
            self._update.bucket(blobs_for)
        times = self._update.commit(self.publisher.sender.receipts)
        self.metrics = {
            "sync/load_s": Max(times.load_s),
            "sync/paused_s": Max(times.paused_s),
            "sync/loaded_bytes": Sum(times.bytes),
        }
        if timeline := self.publisher.timeline:
            end = now()
            timeline.add(Span("update", "publish", self.version, end - times.paused_s, end))
        return self._update.sizes

    def _drop(self, failures: Iterable[Failures]) -> None:
        for rank_failures in failures:
            for engine, reason in rank_failures.items():
                self._update.drop(engine, reason)


def refuse_unlike(align: Align, backend: str, engines: Sequence[EngineRecord]) -> None:
    """Raise ConfigError if the policy quantizes tokens as other engines than these do."""
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


def _blobs_for(parts: Sequence[Blobs]) -> BlobsFor:
    """Return all training ranks' blobs by engine rank, made JSON once for all engines."""
    by_place: dict[Rank | None, list[Blob]] = {}
    for blobs in parts:
        for to, blob in blobs.items():
            of_place = by_place.setdefault(to, [])
            if blob.pieces:
                of_place.append(blob)
    as_json = {to: encoded(blobs) for to, blobs in by_place.items()}
    return lambda engine, rank: as_json[None if None in as_json else (engine.tp, rank)]
