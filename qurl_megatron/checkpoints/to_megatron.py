"""Hugging Face -> Megatron's ``torch_dist``: read an op's tensors, fold, fuse, cut, write.

One op at a time: memory holds one parameter, whatever the size of the model. Weights are
divided by s in FP32, before any rounding.
"""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from qurl_megatron.checkpoints.job import ConversionJob, OutputFile
from qurl_megatron.checkpoints.megatron_reader import disk_key, stacked_parts
from qurl_megatron.checkpoints.ops import GateUp, Op
from qurl_megatron.checkpoints.places import DESCRIPTION
from qurl_megatron.checkpoints.source import Checkpoint, describe, read_tensors, with_dtype
from qurl_megatron.checkpoints.torch_dist import Chunk, write_chunks, write_table
from qurl_megatron.checkpoints.uaq import refuse_second_fold
from qurl_megatron.tensors.arch import Arch
from qurl_megatron.tensors.slice import Slice, buckets

# State that Megatron's linear layers store beside their weights when they do not train in FP8.
_NO_STATE: list[None] = [None]
_STATE_BYTES = 1261  # of one such object, as torch.save writes it


def to_megatron(
    source: Checkpoint,
    out: Path,
    *,
    uaq_scale: float = 1.0,
    dtype: torch.dtype | None = None,
    tensor: int = 1,
    file_bytes: int = 1 << 28,
) -> ConversionJob:
    """Return the job that writes a Megatron checkpoint of a model.

    Args:
        uaq_scale: factor to fold into norms and the linear layers that read them (paper Eq. 11).
        dtype: format of the weights; None loses nothing: the source's own, or FP32 where dividing
            needs it.
        tensor: tensor-parallel size the chunks are cut for, and the vocabulary is padded to. Any
            other layout loads too.
        file_bytes: size at which a file is full; one is summed up while the next is written.

    Raises:
        ConfigError: the model contradicts its config, does not divide over the ranks, or has
            a factor folded in already.
    """
    refuse_second_fold(source.config, uaq_scale)
    source.arch.check_parallel(tensor, 1, tensor_key="--tensor")
    source.reader.check(source.arch)

    def stored(op: Op) -> torch.dtype:
        source_dtype = source.reader.dtype(op)
        # A power of two moves the exponent alone; FP16 has too few of them.
        power_of_two = math.frexp(uaq_scale)[0] == 0.5
        exact = uaq_scale == 1.0 or power_of_two and source_dtype != torch.float16
        return dtype or (source_dtype if exact else torch.float32)

    ops = source.ops()
    places: dict[str, list[tuple[Chunk, int, int]]] = {}  # by file
    chunks = {op.megatron: _chunks(source.arch, op, tensor, stored(op)) for op in ops}

    def size(op: Op) -> int:
        return sum(chunk.bytes for chunk in chunks[op.megatron])

    def write(path: Path, batch: list[Op]) -> None:
        places[path.name] = write_chunks(path, tensors(batch))

    def write_state(path: Path) -> None:
        places[path.name] = write_chunks(path, ((chunk, _NO_STATE) for chunk in state))

    def tensors(batch: list[Op]) -> Iterator[tuple[Chunk, Tensor]]:
        for op in batch:
            tensors_of_op = read_tensors(source, op, stored(op), fold=uaq_scale)
            yield from _cut(op, tensors_of_op, chunks[op.megatron])

    files = []
    for number, batch in enumerate(buckets(ops, list(map(size, ops)), file_bytes)):
        total = sum(size(op) for op in batch)
        files.append(OutputFile(f"__0_{number}.distcp", total, partial(write, batch=batch)))
    state = _state_objects(source.arch)
    files.append(OutputFile("__1_0.distcp", _STATE_BYTES * len(state), write_state))
    widest = max(map(stored, ops), key=lambda form: form.itemsize)
    config = with_dtype(source.folded_config(source.uaq_scale * uaq_scale), widest)

    def finish(folder: Path) -> None:
        write_table(folder, places)
        describe(source, folder / DESCRIPTION, config)

    return ConversionJob(out, files, finish)


def _chunks(arch: Arch, op: Op, tensor: int, dtype: torch.dtype) -> list[Chunk]:
    """Cut a parameter into the chunks that each of ``tensor`` ranks reads, part by part."""
    key, index = disk_key(op.megatron)
    extents = arch.stacked[: len(index)]
    full_shape = list(op.shape)
    split_dim, stacked = op.hf[0].split_dim, stacked_parts(op)
    if op.hf[0].vocabulary:
        full_shape[0] = -(-full_shape[0] // tensor) * tensor
    sizes, count = list(full_shape), 1
    if split_dim is not None:
        count = stacked * tensor
        sizes[split_dim] //= count
    chunks = []
    for number in range(count):
        offsets = [0] * len(full_shape)
        if split_dim is not None:
            offsets[split_dim] = number * sizes[split_dim]
        part = Slice((*index, *offsets), (*(1 for _ in index), *sizes))
        chunks.append(Chunk(key, (*extents, *full_shape), part, dtype))
    return chunks


def _cut(op: Op, hf: dict[str, Tensor], chunks: list[Chunk]) -> Iterator[tuple[Chunk, Tensor]]:
    """Yield the tensors of ``_chunks``, in order; gate and up need no joining to be cut."""
    parts = [hf[t.name] for t in op.hf] if isinstance(op, GateUp) else [op.to_megatron(hf)]
    split_dim, each = op.hf[0].split_dim, len(chunks) // len(parts)
    for number, chunk in enumerate(chunks):
        piece = parts[number // each]
        if split_dim is not None:
            step = chunk.part.sizes[split_dim - piece.ndim]
            start = min((number % each) * step, piece.shape[split_dim])
            length = min(step, piece.shape[split_dim] - start)
            piece = piece.narrow(split_dim, start, length)
            if length < step:  # a vocabulary that does not divide
                piece = functional.pad(piece, (0, 0, 0, step - length))
        yield chunk, piece


def _state_objects(arch: Arch) -> list[Chunk]:
    """Return the objects that Megatron's loader wants beside the weights of linear layers."""
    chunks = []

    def add(module: str, *at: int) -> None:
        position, size = (".".join(map(str, x)) for x in (at, arch.stacked[: len(at)]))
        chunks.append(Chunk(f"decoder.layers.{module}._extra_state/shard_{position}_{size}"))

    for layer in range(arch.num_layers):
        for module in ("core_attention", "linear_proj", "linear_qkv"):
            add(f"self_attention.{module}", layer)
        for module in ("linear_fc1", "linear_fc2"):
            if arch.experts is None:
                add(f"mlp.{module}", layer)
                continue
            for expert in range(arch.experts.count):
                add(f"mlp.experts.experts.{module}", layer, expert)
            if arch.experts.shared:
                add(f"mlp.shared_experts.{module}", layer)
    return chunks
