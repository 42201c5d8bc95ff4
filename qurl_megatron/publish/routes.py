"""Who holds which rows of which tensor, in the trainer and in an engine, and so who sends what.

Nothing is gathered: a training rank sends each engine rank the part that both hold, rows or columns
of one Hugging Face tensor. Both layouts follow from the architecture and a few sizes, so every
process can work out the whole plan by itself.

Training ranks are (pipeline stage, tensor rank). What their tensor ranks all hold is sent by the
first. Data-parallel replicas hold the same and take turns: bucket i is the work of replica i % dp.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import Arch
from qurl_megatron.tensors.slice import Slice
from qurl_megatron.tensors.table import HfTensor, hf_tensor

VOCABULARY_STEP = 64  # SGLang pads the vocabulary to a multiple of it before it splits


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the trainer splits the model."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    def replica(self, bucket: int) -> int:
        """The data-parallel replica that sends a bucket."""
        return bucket % self.data


@dataclass(frozen=True)
class Transfer:
    """What one training rank sends one engine rank of one tensor."""

    source: tuple[int, int]  # (pipeline stage, tensor rank)
    engine_rank: int
    name: str
    part: Slice
    bytes: int


Tensors = Mapping[str, tuple[tuple[int, ...], int]]
"""name -> (whole shape, bytes per element); scales are tensors of their own."""


def engine_part(tensor: HfTensor, shape: Sequence[int], tp: int, rank: int) -> Slice:
    """What an SGLang rank of ``tp`` keeps of a whole tensor.

    Query heads are split; key and value heads too, or where there are fewer than ranks, each is
    kept by several. The vocabulary is padded, split evenly, and the padding is nobody's.

    Raises:
        ConfigError: ``tp`` does not divide what it splits, or the shape is not the model's.
    """
    units = tensor.units
    if tensor.vocabulary:
        return _vocabulary(shape, _sglang_rows(shape[0], tp), rank)
    if units is not None and units.repeats and tp > units.count:
        _divide(tp, units.count, "the engine's tensor size", units.key, tensor.name)
        _expect(tensor, shape)
        head = rank // (tp // units.count)
        return Slice.along(shape, 0, head * units.width, (head + 1) * units.width)
    return _split(tensor, shape, tp, rank, "the engine's tensor size")


def trainer_part(
    arch: Arch, tensor: HfTensor, shape: Sequence[int], layout: Layout, stage: int, rank: int
) -> Slice | None:
    """What a training rank holds of a whole tensor and is the one to send; None: nothing.

    Raises:
        ConfigError: the layout does not divide the model, or the shape is not the model's.
    """
    arch.check_parallel(layout.tensor, layout.pipeline)
    if _stage(arch, tensor.name, layout.pipeline) != stage:
        return None
    if tensor.vocabulary:
        part = _vocabulary(shape, -(-shape[0] // layout.tensor), rank)
        return part if part.elements else None
    if rank > 0 and tensor.split_dim is None:
        return None
    return _split(tensor, shape, layout.tensor, rank, "parallel.tensor")


def transfers(tensors: Tensors, arch: Arch, layout: Layout, engine_tp: int) -> list[Transfer]:
    """Every transfer from one replica of the trainer to the ranks of one engine.

    Raises:
        ConfigError: either layout does not divide the model, or no such tensor is known.
    """
    parts = []
    for name, (shape, element) in tensors.items():
        tensor = hf_tensor(arch, name)
        needs = [engine_part(tensor, shape, engine_tp, rank) for rank in range(engine_tp)]
        for source, have in _holders(arch, tensor, shape, layout):
            for engine_rank, need in enumerate(needs):
                if part := have.overlap(need):
                    size = element * part.elements
                    parts.append(Transfer(source, engine_rank, name, part, size))
    return parts


def buckets(sizes: Sequence[int], limit: int) -> list[range]:
    """Runs of consecutive items that add up to ``limit`` at most; a larger item is alone."""
    ranges, begin, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > begin and total + size > limit:
            ranges.append(range(begin, index))
            begin, total = index, 0
        total += size
    return [*ranges, range(begin, len(sizes))] if sizes else []


def _holders(
    arch: Arch, tensor: HfTensor, shape: Sequence[int], layout: Layout
) -> Iterator[tuple[tuple[int, int], Slice]]:
    stage = _stage(arch, tensor.name, layout.pipeline)
    for rank in range(layout.tensor):
        if have := trainer_part(arch, tensor, shape, layout, stage, rank):
            yield (stage, rank), have


def _stage(arch: Arch, name: str, stages: int) -> int:
    """The pipeline stage that exports a tensor; of tied embeddings, the one that embeds."""
    if name == "model.embed_tokens.weight":
        return 0
    if name.startswith("model.layers."):
        layer = int(name.removeprefix("model.layers.").partition(".")[0])
        return layer // (arch.num_layers // stages)
    return stages - 1


def _split(tensor: HfTensor, shape: Sequence[int], size: int, rank: int, key: str) -> Slice:
    """The even split that Megatron and SGLang share; ``key`` is what the user calls ``size``."""
    dim, units = tensor.split_dim, tensor.units
    if dim is None:
        return Slice.whole(shape)
    assert units is not None, "what is split has units"
    _divide(units.count, size, units.key, key, tensor.name)
    _expect(tensor, shape)
    length = units.length // size
    return Slice.along(shape, dim, rank * length, (rank + 1) * length)


def _divide(units: int, size: int, what: str, key: str, name: str) -> None:
    if units % size:
        raise ConfigError(f"tensor {name}: {key}={size} does not divide {what}={units}")


def _expect(tensor: HfTensor, shape: Sequence[int]) -> None:
    dim, units = tensor.split_dim, tensor.units
    assert dim is not None and units is not None, "only what is split is expected to fit"
    if shape[dim] != units.length:
        raise ConfigError(
            f"tensor {tensor.name} is {list(shape)}, the architecture says {units.length} "
            f"along {dim}"
        )


def _sglang_rows(vocab: int, tp: int) -> int:
    """Rows of the padded vocabulary per rank."""
    step = VOCABULARY_STEP
    if -(-vocab // step) * step % tp:
        step *= tp
    return -(-vocab // step) * step // tp


def _vocabulary(shape: Sequence[int], rows: int, rank: int) -> Slice:
    vocab = shape[0]
    return Slice.along(shape, 0, min(rank * rows, vocab), min((rank + 1) * rows, vocab))
