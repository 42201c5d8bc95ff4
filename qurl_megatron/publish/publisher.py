"""Publish the policy's weights as one new version: every rank quantizes and sends its own shard.

No full tensor is gathered anywhere. Row-parallel ranks agree on their channels' scales by a MAX
all-reduce; data- and context-parallel replicas take turns, bucket by bucket. While the engines load
one bucket, the ranks quantize the next, and no more than two are in memory.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.actor.aligned import Align
from qurl_megatron.actor.megatron import held, on_lead
from qurl_megatron.actor.policy import Policy
from qurl_megatron.config import QuantConfig, SyncConfig
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.fleet.roster import EngineRecord
from qurl_megatron.kit.clock import now
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.metrics import Max, Metric, Sum
from qurl_megatron.observe.timeline import Span, Timeline
from qurl_megatron.publish import routes
from qurl_megatron.publish.drift import Drift
from qurl_megatron.publish.update import BlobsFor, Update
from qurl_megatron.quant import quantize, rounding_of
from qurl_megatron.quant.formats import scheme_named
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.tensors.table import hf_tensor, is_quantized, is_vocabulary
from qurl_megatron.wire.manifest import manifest_of
from qurl_megatron.wire.message import ALIGNMENT, Blob, Room, encoded
from qurl_megatron.wire.transport import Failures, Rank, Sender

MIB = 2**20

Blobs = dict[Rank | None, Blob]
"""One training rank's part of a bucket, by the engine rank it is for; None: for all of them."""


Contribution = tuple[Blobs, dict[str, tuple[int, ...]]]
"""A training rank's part of one round, and the whole shapes of the tensors it has parts of."""


@dataclass(frozen=True)
class _Portion:
    """A Megatron parameter of this rank, or one of several runs of its rows."""

    parameter: int
    part: int
    parts: int

    def of(self, shard: Shard) -> Shard:
        if self.parts == 1:
            return shard
        start, stop = (len(shard.value) * part // self.parts for part in (self.part, self.part + 1))
        return replace(shard, value=shard.value[start:stop], start=shard.start + start)


@dataclass
class _Spent:
    """What one version took on this rank."""

    quantize_s: float = 0.0
    put_s: float = 0.0
    send_s: float = 0.0  # put, and waiting for the others and for the engines
    bytes: int = 0
    largest: int = 0  # bytes of the largest bucket
    filled: float = 0.0  # when the last bucket was put, of the performance counter


class Publisher:
    """All ranks make one and call it together. Leaving it as a context removes what was sent."""

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
        self.rounding, self.seed = quant.rounding, seed
        self.stage = stage
        self.timeline = timeline
        self._quant, self.drift = quant, Drift(quant)
        self._dtype = next(policy.gpt.parameters()).dtype
        self.publish_as(quant.scheme)

    def publish_as(self, scheme: str) -> None:
        """Publish in this number format from now on; all ranks call it together.

        The engines must be those of this format (``Fleet.switch``) when the next version comes.
        """
        self.scheme = scheme
        if self.policy.ranks.copies.size > 1:  # they get other tensors to send than they held
            self.drift = Drift(self._quant)
        layout = self.policy.hf_layout()
        limit = int(self.sync.bucket_mb * MIB)
        items, sizes = [], []
        for parameter, shards in enumerate(layout):
            size = sum(self._sent_bytes(shard) for shard in shards)
            parts = self._parts(shards, size, limit)
            items += [_Portion(parameter, part, parts) for part in range(parts)]
            sizes += [size // parts] * parts
        runs = routes.buckets(sizes, limit)
        self._buckets = [[items[i] for i in run] for run in runs]
        # Row-parallel scales are whole on the rank that sends them, and every tensor is aligned.
        extra = [sum(map(self._extra_bytes, layout[item.parameter])) for item in items]
        self._most_bytes = max((sum(sizes[i] + extra[i] for i in run) for run in runs), default=0)
        counts: list = [None] * self.policy.ranks.world_size
        dist.all_gather_object(counts, len(self._buckets))
        self._rounds = -(-max(counts) // self.policy.ranks.copies.size)

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *exception: object) -> None:
        self.sender.close()

    def publish(self, version: int) -> dict[str, Metric]:
        """Quantize, send and load ``version`` everywhere; all ranks call it together.

        Returns:
            This rank's metrics: of the quantization, and of the time and bytes it took.

        Raises:
            EngineError: no engine confirmed the version; none serves a part of it.
            ConfigError: a rank could not write, or has weights that cannot be quantized.
        """
        spent = _Spent()
        with ExitStack() as stack:
            lead = _Lead(self, self.fleet, version, stack) if self.fleet else None
            begin = partial(self.sender.begin, version)
            engines = self._agree(begin, lead.begin if lead else None)
            failures = self.sender.connect(engines)
            for index in range(self._rounds):
                fill = partial(self._fill, index, version, engines, failures, spent)
                alive = self._agree(fill, lead.load if lead else None)
                for engine in engines.keys() - alive.keys():
                    self.sender.drop(engine)
                engines, failures = alive, {}
                self.sender.deliver(index)
                spent.send_s += time.perf_counter() - spent.filled
            self._agree(self.sender.settle, lead.commit if lead else None)
        self.sender.finish(keep=self.sync.keep)
        return {
            **self.drift.metrics(),
            **(lead.metrics if lead else {}),
            "sync/quantize_s": Max(spent.quantize_s),
            "sync/put_s": Max(spent.put_s),
            "sync/send_s": Max(spent.send_s),
            "sync/bytes": Sum(spent.bytes),
            "sync/buffer_mb": Max(2 * spent.largest / MIB),
        }

    def _agree(self, make: Callable[[], Any], act: Callable[[list], Any] | None) -> Any:
        """Every rank makes its part; the leading rank acts on all of them, and all learn of it.

        Returns:
            What ``act`` returned.

        Raises:
            EngineError, ConfigError: the first of a rank's, or what ``act`` raised; on every rank.
        """
        try:
            outcome = make()
        except ConfigError as error:  # the others count on this rank
            outcome = error
        gathered: list = [None] * self.policy.ranks.world_size
        dist.gather_object(outcome, gathered if act else None)

        def acted() -> Any:
            for part in gathered:
                if isinstance(part, ConfigError):
                    raise part
            return held(act)(gathered)

        return on_lead(acted, self.policy.ranks, waiting_for="publishing")

    def _fill(
        self,
        index: int,
        version: int,
        engines: Mapping[str, int],
        failures: Failures,
        spent: _Spent,
    ) -> tuple[Contribution, Failures]:
        """Quantize this rank's bucket of one round and put it where the engines can fetch it.

        Args:
            failures: engines that this rank could not reach meanwhile, handed through.

        Raises:
            ConfigError: a weight cannot be quantized, or there is no room for the bucket.
        """
        start = time.perf_counter()
        shards = self._quantized(index, version)
        spent.quantize_s += time.perf_counter() - start
        start = time.perf_counter()
        blobs: Blobs = {}
        if not self.sender.cut:
            blobs[None] = self.sender.put(index, shards)
        else:
            for tp in sorted(set(engines.values())):
                for rank in range(tp):
                    parts = self._cut(shards, tp, rank)
                    blobs[tp, rank] = self.sender.put(index, parts, to=(tp, rank))
        spent.filled = time.perf_counter()
        spent.put_s += spent.filled - start
        spent.send_s += spent.filled - start
        size = sum(blob.bytes for blob in blobs.values())
        spent.bytes += size
        spent.largest = max(spent.largest, size)
        return (blobs, {shard.name: shard.shape for shard in shards}), failures

    def _quantized(self, index: int, version: int) -> list[Shard]:
        """What this rank sends in one round: codes, scales and high-precision tensors."""
        ranks = self.policy.ranks
        memory = self.sender.room(index, self._most_bytes)
        # What a GPU makes is copied to the host in one go, by ``put``, and not piece by piece.
        on_device = memory is not None and memory.device.type == ranks.device.type
        room = Room(memory if on_device else None)
        shards: list[Shard] = []
        mistake: ConfigError | None = None
        for replica in range(ranks.copies.size):
            bucket = index * ranks.copies.size + replica
            if bucket >= len(self._buckets):
                break
            # Every replica lends its part of the masters, and one of them has the work.
            for item in self._buckets[bucket]:
                for shard in self.policy.master_shards(item.parameter, owner=replica):
                    try:
                        shards += self._export(item.of(shard), version, room)
                    except ConfigError as error:  # the others count on this rank to the end
                        mistake = mistake or error
        if mistake:
            raise mistake
        return [shard for shard in shards if self._sends(shard.value.shape, shard.dim)]

    def _sends(self, shape: Sequence[int], split_dim: int | None) -> bool:
        """What all tensor ranks hold is sent by the first; padding of the vocabulary by nobody."""
        return math.prod(shape) > 0 and (
            split_dim is not None or self.policy.ranks.tensor.rank == 0
        )

    def _export(self, shard: Shard, version: int, room: Room) -> list[Shard]:
        """What a version holds for this shard: codes and scale, or one high-precision tensor.

        Each is made in the bucket's room where there is some and this rank sends it.
        """
        name, dim = shard.name, shard.dim
        quantized = is_quantized(name)
        if not quantized or self.scheme == "none":
            if quantized:
                self.drift.observe(name, shard.value, None, version)
            return [replace(shard, value=self._made(room, shard.value, self._dtype, dim))]
        row_parallel = dim == 1
        out = None
        if self._sends(shard.value.shape, dim):
            out = room.place(shard.value.shape, scheme_named(self.scheme).dtype)
        try:
            codes = quantize(
                shard.value,
                self.scheme,
                input_group=self.policy.ranks.tensor.group if row_parallel else None,
                rounding=rounding_of(
                    self.rounding,
                    seed=self.seed,
                    version=version,
                    name=name,
                    shape=shard.shape,
                    split_dim=dim,
                    offset=shard.start,
                ),
                out=out,
            )
        except ConfigError as error:
            raise ConfigError(f"tensor {name}: {error}") from error
        self.drift.observe(name, shard.value, codes, version)
        scale = hf_tensor(self.policy.arch, f"{name}_scale")
        value = self._made(room, codes.scale, codes.scale.dtype, scale.split_dim)
        start = 0 if scale.split_dim is None else shard.start
        return [
            replace(shard, value=codes.values),
            Shard(scale.name, value, scale.shape, scale.split_dim, start),
        ]

    def _made(self, room: Room, value: Tensor, dtype: torch.dtype, split_dim: int | None) -> Tensor:
        """``value`` as ``dtype``, in the room where this rank sends it."""
        if self._sends(value.shape, split_dim):
            place = room.place(value.shape, dtype)
            if place is not None:
                return place.copy_(value)
        return value.to(dtype)

    def _cut(self, shards: Sequence[Shard], tp: int, rank: int) -> list[Shard]:
        """The parts of ``shards`` that one engine rank keeps."""
        parts: list[Shard] = []
        for shard in shards:
            tensor = hf_tensor(self.policy.arch, shard.name)
            if part := shard.cut(routes.engine_part(tensor, shard.shape, tp, rank)):
                parts.append(part)
        return parts

    def _parts(self, shards: Sequence[Shard], size: int, limit: int) -> int:
        """Into how many a parameter's rows are divided, so that a bucket stays within its limit.

        Embeddings and output layers outgrow it, and being unquantized divide anywhere. Replicas
        would have to lend their masters once per part.
        """
        if self.policy.ranks.copies.size > 1 or not all(is_vocabulary(s.name) for s in shards):
            return 1
        return max(1, -(-size // limit))

    def _sent_bytes(self, shard: Shard) -> int:
        """Bytes that a shard becomes, the same on all tensor ranks: they fill buckets in step."""
        elements = math.prod(shard.shape)
        split = self.policy.ranks.tensor.size if shard.dim is not None else 1
        if is_quantized(shard.name) and self.scheme != "none":
            return (elements + 4 * shard.shape[0]) // split
        return elements * self._dtype.itemsize // split

    def _extra_bytes(self, shard: Shard) -> int:
        """About what ``_sent_bytes`` leaves out.

        Padded rows of a vocabulary may exceed it; what then has no room is copied.
        """
        quantized = is_quantized(shard.name) and self.scheme != "none"
        return 2 * ALIGNMENT + (4 * shard.shape[0] if quantized else 0)


class _Lead:
    """What the leading rank does for one version, between the ranks' rounds."""

    def __init__(self, publisher: Publisher, fleet: Fleet, version: int, stack: ExitStack) -> None:
        self.publisher, self.fleet, self.version, self.stack = publisher, fleet, version, stack
        self.metrics: dict[str, Metric] = {}
        self._rounds: list[list[Contribution]] = []

    def begin(self, begun: list) -> dict[str, int]:
        """The engines that are to take the version, with their tensor sizes."""
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

    def load(self, parts: list[tuple[Contribution, Failures]]) -> dict[str, int]:
        """Have the engines load one round; those that are left, with their tensor sizes."""
        self._fail([failures for _, failures in parts])
        contributions = [contribution for contribution, _ in parts]
        if self.publisher.sender.lasting:
            self._rounds.append(contributions)
        if not self.publisher.stage:
            self._update.bucket(_blobs_for(contributions))
        return self._update.sizes

    def commit(self, failures: list[Failures]) -> None:
        """Make the version the one that is served."""
        self._fail(failures)
        publisher = self.publisher
        if publisher.sender.lasting:
            blobs = [b for parts in self._rounds for blobs, _ in parts for b in blobs.values()]
            shapes = {
                n: s for parts in self._rounds for _, shapes in parts for n, s in shapes.items()
            }
            publisher.sender.seal(manifest_of(self.version, publisher.scheme, blobs, shapes))
        if publisher.stage:
            for contributions in self._rounds:
                self._update.bucket(_blobs_for(contributions))
        times = self._update.commit(publisher.sender.receipts)
        self.metrics = {
            "sync/load_s": Max(times.load_s),
            "sync/paused_s": Max(times.paused_s),
            "sync/loaded_bytes": Sum(times.bytes),
        }
        if publisher.timeline:
            end = now()
            pause_began = end - times.paused_s
            publisher.timeline.add(Span("update", "publish", self.version, pause_began, end))

    def _fail(self, failures: Sequence[Failures]) -> None:
        for engine, reason in {e: r for each in failures for e, r in each.items()}.items():
            self._update.drop(engine, reason)


def refuse_unlike(align: Align, backend: str, engines: Sequence[EngineRecord]) -> None:
    """Raise where the policy quantizes tokens as other engines than these do."""
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


def _blobs_for(contributions: Sequence[Contribution]) -> BlobsFor:
    """What all training ranks have for each engine rank, made JSON once for all engines."""
    places = {to for blobs, _ in contributions for to in blobs}
    found = {
        to: encoded([blobs[to] for blobs, _ in contributions if to in blobs and blobs[to].pieces])
        for to in places
    }
    return lambda engine, rank: found[None if None in found else (engine.tp, rank)]
