"""One training rank's part of a version: its shards, quantized in buckets and cut for engines.

No full tensor is gathered anywhere. Row-parallel ranks agree on their channels' scales by a MAX
all-reduce; a square that shares a scale is never cut. Ranks that hold the same shard (data- and
context-parallel replicas; of experts, the ranks with the same ones) take turns, bucket by bucket.
Tensors that all tensor-parallel ranks hold are sent by the first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qurl_megatron.actor.megatron import Axis, everywhere
from qurl_megatron.actor.policy import Policy
from qurl_megatron.config import QuantConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.publish.drift import Drift
from qurl_megatron.quant import quantize, rounding_of
from qurl_megatron.quant.rounding import scheme_named
from qurl_megatron.schemes import SCALES, SCHEMES, scale_grid
from qurl_megatron.tensors.slice import Shard, Slice, buckets
from qurl_megatron.tensors.table import HfTensor, hf_tensor, is_quantized, is_vocabulary
from qurl_megatron.wire.message import Room

VOCABULARY_STEP = 64  # SGLang pads the vocabulary to a multiple of it before it splits


@dataclass(frozen=True)
class _Portion:
    """A Megatron parameter of this rank, or one of equal ``parts`` of its rows."""

    parameter: int
    part: int
    parts: int

    def of(self, shard: Shard) -> Shard:
        if self.parts == 1:
            return shard
        rows = len(shard.value)
        start, stop = rows * self.part // self.parts, rows * (self.part + 1) // self.parts
        return replace(shard, value=shard.value[start:stop], start=shard.start + start)


class RankShards:
    """All ranks make one and call it together."""

    def __init__(self, policy: Policy, quant: QuantConfig, limit: int, seed: int) -> None:
        """
        Args:
            limit: bytes of a bucket.
            seed: the run's, for the draws of ``quant.rounding``.
        """
        self._policy, self._ranks = policy, policy.ranks
        self._rounding, self._scheme, self._seed = quant.rounding, quant.scheme, seed
        self._dtype = next(policy.gpt.parameters()).dtype
        # By the number of ranks that take turns; all ranks have equally many rounds of each kind.
        ranks = policy.ranks
        portions: dict[int, list[_Portion]] = {ranks.copies.size: [], ranks.expert_copies.size: []}
        sizes: dict[int, list[int]] = {turns: [] for turns in portions}
        for parameter, shards in enumerate(policy.hf_layout()):
            turns = policy.copies_of(parameter).size
            split = policy.splits(parameter).size
            size = sum(self._sent_bytes(shard, split) for shard in shards)
            parts = self._parts(shards, size, limit)
            for part in range(parts):
                portions[turns].append(_Portion(parameter, part, parts))
                sizes[turns].append(size // parts)
        self._rounds: list[list[list[_Portion]]] = []
        for turns, of_kind in portions.items():
            own_buckets = buckets(of_kind, sizes[turns], limit)
            for start in range(0, max(everywhere(len(own_buckets))), turns):
                self._rounds.append(own_buckets[start : start + turns])

    @property
    def rounds(self) -> int:
        return len(self._rounds)

    def quantized(
        self, index: int, version: int, memory: Tensor | None, drift: Drift
    ) -> list[Shard]:
        """Return this rank's tensors of one round: codes, scales and high-precision tensors.

        Args:
            memory: ``Sender.room``; the shards are made there if it is on the policy's device.

        Raises:
            ConfigError: a weight cannot be quantized.
        """
        # Shards of a GPU are better copied to the host by ``put``, all at once.
        on_device = memory is not None and memory.device.type == self._ranks.device.type
        room = Room(memory if on_device else None)
        shards: list[Shard] = []
        mistake: ConfigError | None = None
        for replica, bucket in enumerate(self._rounds[index]):
            # All replicas lend their parts of the master weights, and one of them does the work.
            for portion in bucket:
                split = self._policy.splits(portion.parameter)
                for shard in self._policy.master_shards(portion.parameter, owner=replica):
                    try:
                        shards += self._export(portion.of(shard), split, version, room, drift)
                    except ConfigError as error:  # other ranks need this one in every collective
                        mistake = mistake or error
        if mistake:
            raise mistake
        _refuse_inf_and_nan([shard for shard in shards if shard.name.endswith(SCALES)])
        return shards

    def cut(self, shards: Sequence[Shard], tp: int, rank: int) -> list[Shard]:
        """Return the parts of ``shards`` that one engine rank keeps."""
        parts: list[Shard] = []
        for shard in shards:
            tensor = hf_tensor(self._policy.arch, shard.name)
            if part := shard.cut(engine_part(tensor, shard.shape, tp, rank)):
                parts.append(part)
        return parts

    def _export(
        self, shard: Shard, split: Axis, version: int, room: Room, drift: Drift
    ) -> list[Shard]:
        """Return this rank's part of codes and scale, or of one high-precision tensor.

        Args:
            split: the ranks that have the tensor's other parts.
        """
        name, dim = shard.name, shard.dim

        def sent(value: Tensor, split_dim: int | None) -> bool:
            # False if another rank sends it, or if it is nothing but padding of the vocabulary.
            return value.numel() > 0 and (split_dim is not None or split.rank == 0)

        def converted(of: Shard, dtype: torch.dtype) -> list[Shard]:
            if not sent(of.value, of.dim):
                return []
            place = room.place(of.value.shape, dtype)
            value = of.value.to(dtype) if place is None else place.copy_(of.value)
            return [replace(of, value=value)]

        quantized = is_quantized(name)
        if not quantized or self._scheme == "none":
            if quantized:
                drift.observe(name, shard.value, None, version)
            return converted(shard, self._dtype)
        scale = hf_tensor(self._policy.arch, name + SCHEMES[self._scheme].scale)
        start = 0
        if scale.split_dim is not None:
            stop = shard.start + shard.value.shape[scale.split_dim]
            start, _ = scale.part(shard.start, stop, "a smaller parallel.tensor")
        out = None
        if sent(shard.value, dim):
            out = room.place(shard.value.shape, scheme_named(self._scheme).dtype)
        try:
            codes = quantize(
                shard.value,
                self._scheme,
                input_group=split.group if dim == 1 else None,
                rounding=rounding_of(
                    self._rounding,
                    seed=self._seed,
                    version=version,
                    name=name,
                    shape=shard.shape,
                    split_dim=dim,
                    offset=shard.start,
                ),
                out=out,
                check=False,
            )
        except ConfigError as error:
            raise ConfigError(f"tensor {name}: {error}") from error
        drift.observe(name, shard.value, codes, version)
        own_scale = Shard(scale.name, codes.scale, scale.shape, scale.split_dim, start)
        own_codes = [replace(shard, value=codes.values)] if sent(codes.values, dim) else []
        return own_codes + converted(own_scale, codes.scale.dtype)

    def _parts(self, shards: Sequence[Shard], size: int, limit: int) -> int:
        """Return into how many parts a parameter is cut so that each fits into a bucket.

        Only embeddings and output layers outgrow it. Unquantized, they can be cut at any row.
        Replicas would have to lend their master weights once per part, so they cut nothing.
        """
        if self._ranks.copies.size > 1 or not all(is_vocabulary(s.name) for s in shards):
            return 1
        return max(1, -(-size // limit))

    def _sent_bytes(self, shard: Shard, ranks: int) -> int:
        """Return the bytes that a shard becomes when it is sent.

        All ``ranks`` that have parts of the tensor get the same number, so they fill their buckets
        in step.
        """
        elements = math.prod(shard.shape)
        split = ranks if shard.dim is not None else 1
        if is_quantized(shard.name) and self._scheme != "none":
            scales = math.prod(scale_grid(shard.shape, SCHEMES[self._scheme].block))
            return (elements + 4 * scales) // split
        return elements * self._dtype.itemsize // split


def _refuse_inf_and_nan(scales: Sequence[Shard]) -> None:
    """Raise ConfigError for inf or nan in a scale, and so in its weight.

    All are checked at once: reading a result makes the host wait for the GPU.
    """
    if scales and not bool(torch.cat([s.value.flatten() for s in scales]).isfinite().all()):
        bad = next(s for s in scales if not bool(s.value.isfinite().all()))
        name = next(bad.name.removesuffix(end) for end in SCALES if bad.name.endswith(end))
        raise ConfigError(f"tensor {name}: cannot quantize a weight that has inf or nan")


def engine_part(tensor: HfTensor, shape: Sequence[int], tp: int, rank: int) -> Slice:
    """Return the part of a whole tensor that an SGLang rank of ``tp`` keeps.

    Query heads are split. So are key and value heads, but if there are fewer of them than ranks,
    each is kept by several ranks. The vocabulary is padded and split evenly; padding is not sent.

    Raises:
        ConfigError: ``tp`` does not divide a split dimension, or cuts a square that shares a scale;
            or the shape is not the model's.
    """
    units = tensor.units
    if tensor.vocabulary:
        rows, vocab = _sglang_rows(shape[0], tp), shape[0]
        return Slice.along(shape, 0, min(rank * rows, vocab), min((rank + 1) * rows, vocab))
    dim = tensor.split_dim
    if dim is None:
        return Slice.whole(shape)
    assert units is not None, "what is split has units"
    repeated = units.repeats and tp > units.count
    dividend, divisor = (tp, units.count) if repeated else (units.count, tp)
    if dividend % divisor:
        raise ConfigError(
            f"tensor {tensor.name}: the engine's tensor size={tp} does not fit "
            f"{units.key}={units.count}"
        )
    mend = "a smaller tensor size of the engine"
    if shape[dim] != tensor.part(0, units.length, mend)[1]:
        raise ConfigError(
            f"tensor {tensor.name} is {list(shape)}, the architecture says {units.length} "
            f"along {dim}"
        )
    if repeated:
        rank, length = rank // (tp // units.count), units.width
    else:
        length = units.length // tp
    return Slice.along(shape, dim, *tensor.part(rank * length, (rank + 1) * length, mend))


def _sglang_rows(vocab: int, tp: int) -> int:
    """Return the rows of the padded vocabulary per rank."""
    step = VOCABULARY_STEP
    if -(-vocab // step) * step % tp:
        step *= tp
    return -(-vocab // step) * step // tp
