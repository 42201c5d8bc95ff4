"""Checkpoints of either kind -> a Hugging Face folder, in high precision or quantized.

Each op's parameter is read from whatever layout, taken apart, and folded or unfolded in FP32.
Weights are quantized from the widest numbers the source has (a Megatron checkpoint's FP32 masters),
after folding and before any rounding. Norms, embeddings, biases, routers and the output layer keep
the model's own format.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.checkpoints.backends import BACKENDS, check_backend
from qurl_megatron.checkpoints.huggingface import TensorSpec, write_index, write_safetensors
from qurl_megatron.checkpoints.job import ConversionJob, OutputFile
from qurl_megatron.checkpoints.ops import Op
from qurl_megatron.checkpoints.places import SINGLE
from qurl_megatron.checkpoints.source import Checkpoint, describe, read_tensors, with_dtype
from qurl_megatron.checkpoints.uaq import refuse_second_fold
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.quant.export import quantization_config, stored, stored_shapes
from qurl_megatron.tensors.slice import buckets


def to_huggingface(
    source: Checkpoint,
    out: Path,
    *,
    unfold: bool = False,
    dtype: torch.dtype | None = None,
    file_bytes: int = 5 << 30,
) -> ConversionJob:
    """Return the job that writes a Hugging Face checkpoint of a Megatron one.

    Args:
        unfold: take the UAQ factor out again, in FP32; otherwise the weights stay folded and
            config.json says so.
        dtype: format of the weights; None: the model's original one, or the stored one if a
            factor stays folded.
        file_bytes: size at which a file is full.

    Raises:
        ConfigError: the checkpoint contradicts its config.
    """
    source.reader.check(source.arch)
    scale = source.uaq_scale
    remaining = 1.0 if unfold else scale

    def form(op: Op) -> torch.dtype:
        return dtype or (source.natural_dtype(op) if remaining == 1.0 else source.reader.widest(op))

    def specs(op: Op) -> list[TensorSpec]:
        return [TensorSpec(tensor.name, tensor.shape, form(op)) for tensor in op.hf]

    def make(op: Op) -> dict[str, Tensor]:
        return read_tensors(source, op, form(op), unfold=scale / remaining)

    widest = max(map(form, source.ops()), key=lambda each: each.itemsize)
    config = with_dtype(source.folded_config(remaining), widest)
    return _job(source, out, config, specs, make, file_bytes)


def to_quantized(
    source: Checkpoint,
    out: Path,
    *,
    scheme: str,
    backend: str = "native",
    uaq_scale: float = 1.0,
    dtype: torch.dtype | None = None,
    file_bytes: int = 5 << 30,
) -> ConversionJob:
    """Return the job that writes a quantized Hugging Face checkpoint.

    Args:
        scheme: "int8", "fp8" or "fp8_block".
        backend: whose arithmetic makes the codes, one of ``BACKENDS``.
        uaq_scale: factor to fold in on the way (paper Eq. 11).
        dtype: format of tensors that are not quantized; None: the model's own.
        file_bytes: size at which a file is full.

    Raises:
        ConfigError: the backend does not make the scheme, or the checkpoint contradicts its config.
    """
    unquantized = ["lm_head"]  # linear modules that stay in high precision
    if source.arch.experts:
        unquantized += [f"model.layers.{i}.mlp.gate" for i in range(source.arch.num_layers)]
    experts = source.arch.experts is not None
    quantization = quantization_config(scheme, unquantized, experts=experts)
    check_backend(backend, scheme)
    refuse_second_fold(source.config, uaq_scale)
    source.reader.check(source.arch)
    form = dtype or source.natural_dtype(source.ops()[0])  # of the embedding
    quantizer = BACKENDS[backend]

    def specs(op: Op) -> list[TensorSpec]:
        planned = []
        for tensor in op.hf:
            shapes = {tensor.name: (tensor.shape, form)}
            if tensor.quantized:
                shapes = stored_shapes(tensor.name, tensor.shape, scheme)
            planned += [TensorSpec(name, *facts) for name, facts in shapes.items()]
        return planned

    def make(op: Op) -> dict[str, Tensor]:
        if not op.hf[0].quantized:
            return read_tensors(source, op, form, fold=uaq_scale)
        coded: dict[str, Tensor] = {}
        for name, tensor in read_tensors(source, op, None, fold=uaq_scale).items():
            try:
                coded |= stored(name, quantizer(tensor, scheme), scheme)
            except ConfigError as error:
                raise ConfigError(f"tensor {name}: {error}") from error
        return coded

    config = with_dtype(source.folded_config(source.uaq_scale * uaq_scale), form)
    config["quantization_config"] = quantization
    return _job(source, out, config, specs, make, file_bytes)


def _job(
    source: Checkpoint,
    out: Path,
    config: dict[str, Any],
    specs: Callable[[Op], list[TensorSpec]],
    make: Callable[[Op], dict[str, Tensor]],
    file_bytes: int,
) -> ConversionJob:
    """Return the job that writes ``make(op)`` of every op, as ``specs(op)`` announces it."""

    def size(op: Op) -> int:
        return sum(spec.bytes for spec in specs(op))

    def tensors(batch: list[Op]) -> Iterator[tuple[str, Tensor]]:
        for op in batch:
            yield from make(op).items()

    def write(path: Path, batch: list[Op]) -> None:
        write_safetensors(path, planned[path.name], tensors(batch))

    planned: dict[str, list[TensorSpec]] = {}
    files = []
    ops = source.ops()
    all_batches = buckets(ops, list(map(size, ops)), file_bytes)
    for number, batch in enumerate(all_batches, start=1):
        name = SINGLE
        if len(all_batches) > 1:
            name = f"model-{number:05}-of-{len(all_batches):05}.safetensors"
        planned[name] = [spec for op in batch for spec in specs(op)]
        total = sum(spec.bytes for spec in planned[name])
        files.append(OutputFile(name, total, partial(write, batch=batch)))

    def finish(folder: Path) -> None:
        write_index(folder, planned)
        describe(source, folder, config)

    return ConversionJob(out, files, finish, source.folder)
