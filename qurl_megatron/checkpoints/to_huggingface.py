"""Checkpoints of either kind -> a Hugging Face folder, in high precision or quantized.

Each op's parameter is read from whatever layout, taken apart, and folded or unfolded in FP32.
Weights are quantized from the widest numbers the source has (a Megatron checkpoint's FP32 masters),
after folding and before any rounding. Norms, embeddings, biases, routers and the output layer keep
the model's own format.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.checkpoints.backends import BACKENDS, check_backend
from qurl_megatron.checkpoints.huggingface import (
    HfFile,
    TensorGroup,
    TensorSpec,
    plan_files,
    write_index,
    write_safetensors,
)
from qurl_megatron.checkpoints.job import ConversionJob, OutputFile
from qurl_megatron.checkpoints.ops import Op
from qurl_megatron.checkpoints.source import (
    Checkpoint,
    check_source,
    describe,
    fingerprint,
    read_tensors,
    with_dtype,
    write_json,
)
from qurl_megatron.checkpoints.uaq import refuse_second_fold
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.quant.export import (
    extra_files,
    layout,
    quantization_config,
    stored,
    stored_shapes,
)
from qurl_megatron.tensors.table import is_quantized


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
        unfold: take the UAQ factor out again, in FP32; without, the weights stay folded and
            config.json says so.
        dtype: format of the weights; None: the model's original one, or the stored one where a
            factor stays folded.
        file_bytes: where a file is full.

    Raises:
        ConfigError: the checkpoint contradicts its config.
    """
    check_source(source)
    scale = source.uaq_scale
    remaining = 1.0 if unfold else scale

    def group(op: Op) -> TensorGroup:
        form = dtype or (source.natural_dtype(op) if remaining == 1.0 else source.widest(op))
        return TensorGroup(op, tuple(TensorSpec(t.name, t.shape, form) for t in op.hf))

    def make(op: Op) -> dict[str, Tensor]:
        form = group(op).tensors[0].dtype
        return read_tensors(source, op, form, unfold=scale / remaining)

    planned = plan_files([group(op) for op in source.ops()], file_bytes)
    formats = [t.dtype for file in planned for g in file.groups for t in g.tensors]
    config = with_dtype(
        source.folded_config(remaining), max(formats, key=lambda form: form.itemsize)
    )

    def finish(folder: Path, _: dict[str, Any]) -> None:
        write_index(folder, planned)
        describe(source, folder, config)

    request = {
        "kind": "huggingface",
        "source": fingerprint(source),
        "unfold": unfold,
        "dtype": str(dtype) if dtype else "auto",
        "file_bytes": file_bytes,
    }
    return ConversionJob(out, request, output_files(planned, make), finish, source.folder)


def output_files(
    planned: list[HfFile], make: Callable[[Op], dict[str, Tensor]]
) -> list[OutputFile]:
    """Return the planned safetensors files for a job; ``make`` gives the tensors of an op."""
    return [
        OutputFile(
            file.name,
            file.bytes,
            partial(write_safetensors, groups=file.groups, make=make),
        )
        for file in planned
    ]


def to_quantized(
    source: Checkpoint,
    out: Path,
    *,
    scheme: str,
    fmt: str,
    backend: str = "native",
    uaq_scale: float = 1.0,
    dtype: torch.dtype | None = None,
    file_bytes: int = 5 << 30,
) -> ConversionJob:
    """Return the job that writes a quantized Hugging Face checkpoint.

    Args:
        scheme: "int8", "fp8" or "fp8_block".
        fmt: the layout, one of ``quant.export.FORMATS``.
        backend: whose arithmetic makes the codes, one of ``BACKENDS``.
        uaq_scale: factor to fold in on the way (paper Eq. 11).
        dtype: format of tensors that are not quantized; None: the model's own.
        file_bytes: where a file is full.

    Raises:
        ConfigError: no engine loads the scheme in the layout, or the backend does not make it, or
            the checkpoint contradicts its config.
    """
    layout(scheme, fmt)
    check_backend(backend, scheme)
    refuse_second_fold(source.config, uaq_scale)
    check_source(source)
    form = dtype or source.natural_dtype(source.ops()[0])  # of the embedding
    quantizer = BACKENDS[backend]

    def group(op: Op) -> TensorGroup:
        specs = []
        for tensor in op.hf:
            if tensor.quantized:
                planned = stored_shapes(tensor.name, tensor.shape, scheme, fmt)
                specs += [TensorSpec(part, *facts) for part, facts in planned.items()]
            else:
                specs.append(TensorSpec(tensor.name, tensor.shape, form))
        return TensorGroup(op, tuple(specs))

    def make(op: Op) -> dict[str, Tensor]:
        tensors_out: dict[str, Tensor] = {}
        kept = None if op.hf[0].quantized else form
        for name, tensor in read_tensors(source, op, kept, fold=uaq_scale).items():
            if not is_quantized(name):
                tensors_out[name] = tensor
                continue
            try:
                tensors_out |= stored(name, quantizer(tensor, scheme), fmt)
            except ConfigError as error:
                raise ConfigError(f"tensor {name}: {error}") from error
        return tensors_out

    planned = plan_files([group(op) for op in source.ops()], file_bytes)
    ignored = _ignored_modules(source)
    config = with_dtype(source.folded_config(source.uaq_scale * uaq_scale), form)
    config["quantization_config"] = quantization_config(scheme, fmt, ignored)

    def finish(folder: Path, _: dict[str, Any]) -> None:
        write_index(folder, planned)
        describe(source, folder, config)
        for name, contents in extra_files(scheme, fmt, ignored).items():
            write_json(folder / name, contents)

    request = {
        "kind": "quantized",
        "source": fingerprint(source),
        "scheme": scheme,
        "format": fmt,
        "backend": backend,
        "uaq_scale": uaq_scale,
        "dtype": str(dtype) if dtype else "auto",
        "file_bytes": file_bytes,
    }
    return ConversionJob(out, request, output_files(planned, make), finish, source.folder)


def _ignored_modules(source: Checkpoint) -> list[str]:
    """Return the linear modules that stay in high precision: output layer and routers."""
    routers = [
        f"model.layers.{layer}.mlp.gate"
        for layer in range(source.arch.num_layers if source.arch.experts else 0)
    ]
    return ["lm_head", *routers]
