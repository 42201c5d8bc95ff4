"""Hugging Face -> Megatron's ``torch_dist``: read an op's tensors, fold, fuse, cut, write.

One op at a time: memory holds one parameter, whatever the size of the model. Weights are
divided by s in FP32, before any rounding.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qurl_megatron.checkpoints.job import ConversionJob, OutputFile
from qurl_megatron.checkpoints.megatron_reader import disk_key, stacked_parts
from qurl_megatron.checkpoints.ops import GateUp, Op, stage_ops
from qurl_megatron.checkpoints.places import DESCRIPTION
from qurl_megatron.checkpoints.source import (
    Checkpoint,
    check_source,
    describe,
    fingerprint,
    read_tensors,
    with_dtype,
)
from qurl_megatron.checkpoints.torch_dist import Chunk, write_chunks, write_table
from qurl_megatron.checkpoints.uaq import refuse_second_fold
from qurl_megatron.tensors.arch import Arch
from qurl_megatron.tensors.slice import Slice

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
    pipeline: int = 1,
    file_bytes: int = 1 << 28,
) -> ConversionJob:
    """Return the job that writes a Megatron checkpoint of a model.

    Args:
        uaq_scale: factor to fold into norms and the linear layers that read them (paper Eq. 11).
        dtype: format of the weights; None loses nothing: the source's own, or FP32 where dividing
            needs it.
        tensor: tensor-parallel size the chunks are cut for, and the vocabulary is padded to. Any
            other layout loads too.
        pipeline: pipeline stages that get files of their own.
        file_bytes: where a file is full; one is hashed while the next is written.

    Raises:
        ConfigError: the model contradicts its config, does not divide over the layout, or has
            a factor folded in already.
    """
    refuse_second_fold(source.config, uaq_scale)
    source.arch.check_parallel(tensor, pipeline, ("--tensor", "--pipeline"))
    check_source(source)

    def stored(op: Op) -> torch.dtype:
        stored_dtype = source.dtype(op)
        return dtype or (
            stored_dtype if folds_exactly(op, uaq_scale, stored_dtype) else torch.float32
        )

    stages = _stages(source.arch, pipeline)
    all_ops = [op for ops in stages for op in ops]
    chunks = {op.megatron: _chunks(source.arch, op, tensor, stored(op)) for op in all_ops}

    def tensors(ops: Iterable[Op]) -> Iterator[tuple[Chunk, Tensor]]:
        for op in ops:
            tensors_of_op = read_tensors(source, op, stored(op), fold=uaq_scale)
            yield from _cut(op, tensors_of_op, chunks[op.megatron])

    widest = max(map(stored, all_ops), key=lambda form: form.itemsize)
    config = with_dtype(source.folded_config(source.uaq_scale * uaq_scale), widest)

    def finish(folder: Path, rows: dict[str, Any]) -> None:
        write_table(folder, rows)
        describe(source, folder / DESCRIPTION, config)

    request = {
        "kind": "megatron",
        "source": fingerprint(source),
        "uaq_scale": uaq_scale,
        "dtype": str(dtype) if dtype else "auto",
        "tensor": tensor,
        "pipeline": pipeline,
        "file_bytes": file_bytes,
    }
    weights = _weight_files(stages, chunks, tensors, file_bytes)
    return ConversionJob(out, request, [*weights, _state_file(source.arch, pipeline)], finish)


def _weight_files(
    stages: list[list[Op]],
    chunks: dict[str, list[Chunk]],
    tensors: Callable[[Iterable[Op]], Iterator[tuple[Chunk, Tensor]]],
    file_bytes: int,
) -> Iterator[OutputFile]:
    """Yield the files of each stage, none much larger than ``file_bytes``."""

    def write(path: Path, ops: list[Op]) -> list[dict[str, Any]]:
        return write_chunks(path, tensors(ops))

    for stage, ops in enumerate(stages):
        for number, batch in enumerate(_batches(ops, chunks, file_bytes)):
            size = sum(_bytes(chunks[op.megatron]) for op in batch)
            yield OutputFile(f"__{stage}_{number}.distcp", size, partial(write, ops=batch))


def _state_file(arch: Arch, pipeline: int) -> OutputFile:
    """Return the file of the objects that Megatron's loader wants beside the weights."""
    objects = list(_extra_states(arch))
    return OutputFile(
        f"__{pipeline}_0.distcp",
        _STATE_BYTES * len(objects),
        lambda path: write_chunks(path, ((chunk, _NO_STATE) for chunk in objects)),
    )


def folds_exactly(op: Op, scale: float, dtype: torch.dtype) -> bool:
    """True where folding rounds nothing: a power of two moves the exponent alone.

    FP16 has too few of them, and a zero-centred norm is added to.
    """
    moved = math.frexp(scale)[0] == 0.5 and dtype != torch.float16
    return scale == 1.0 or moved and not op.hf[0].zero_centred


def _stages(arch: Arch, pipeline: int) -> list[list[Op]]:
    """Return the ops of each pipeline stage; on disk a tied output layer is the embedding."""
    each = arch.num_layers // pipeline
    stages = [
        stage_ops(
            arch,
            range(stage * each, (stage + 1) * each),
            first=stage == 0,
            last=stage == pipeline - 1,
            fused_norms=True,  # the names on disk
        )
        for stage in range(pipeline)
    ]
    return [
        [op for op in ops if not (arch.tied and op.megatron == "output_layer.weight")]
        for ops in stages
    ]


def _batches(ops: list[Op], chunks: dict[str, list[Chunk]], file_bytes: int) -> Iterator[list[Op]]:
    batch: list[Op] = []
    filled = 0
    for op in ops:
        size = _bytes(chunks[op.megatron])
        if batch and filled + size > file_bytes:
            yield batch
            batch, filled = [], 0
        batch.append(op)
        filled += size
    yield batch


def _bytes(chunks: list[Chunk]) -> int:
    return sum(chunk.bytes for chunk in chunks)


def _chunks(arch: Arch, op: Op, tensor: int, dtype: torch.dtype) -> list[Chunk]:
    """Cut a parameter into the chunks that each of ``tensor`` ranks reads, part by part."""
    key, index = disk_key(op.megatron)
    extents = (arch.num_layers, arch.experts.count if arch.experts else 0)[: len(index)]
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


def _cut(op: Op, made: dict[str, Tensor], chunks: list[Chunk]) -> Iterator[tuple[Chunk, Tensor]]:
    """Yield the tensors of ``_chunks``, in order; gate and up need no joining to be cut."""
    parts = [made[t.name] for t in op.hf] if isinstance(op, GateUp) else [op.to_megatron(made)]
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


def _extra_states(arch: Arch) -> Iterator[Chunk]:
    """Yield the objects that Megatron's loader wants beside the weights, one per linear layer."""
    attention = ("core_attention", "linear_proj", "linear_qkv")
    for layer in range(arch.num_layers):
        for name in attention:
            yield Chunk(_object(f"self_attention.{name}", (layer,), (arch.num_layers,)))
        for name in ("linear_fc1", "linear_fc2"):
            if arch.experts is None:
                yield Chunk(_object(f"mlp.{name}", (layer,), (arch.num_layers,)))
                continue
            for expert in range(arch.experts.count):
                at, extents = (layer, expert), (arch.num_layers, arch.experts.count)
                yield Chunk(_object(f"mlp.experts.experts.{name}", at, extents))


def _object(module: str, at: tuple[int, ...], extents: tuple[int, ...]) -> str:
    position, size = (".".join(map(str, numbers)) for numbers in (at, extents))
    return f"decoder.layers.{module}._extra_state/shard_{position}_{size}"
