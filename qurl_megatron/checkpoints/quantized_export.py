"""A checkpoint of either kind -> a quantized Hugging Face folder that engines load.

Weights are quantized from the widest numbers the source has (a Megatron checkpoint's FP32 masters),
after folding and before any rounding. Norms, embeddings, biases, routers and the output layer keep
the model's own format.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.checkpoints.backends import BACKENDS, check_backend
from qurl_megatron.checkpoints.hf_writer import TensorGroup, TensorSpec, plan_files, write_index
from qurl_megatron.checkpoints.job import ConversionJob
from qurl_megatron.checkpoints.ops import Op
from qurl_megatron.checkpoints.read_source import (
    check_source,
    fingerprint,
    folding,
    read_tensors,
    with_dtype,
)
from qurl_megatron.checkpoints.source import Checkpoint, describe, write_json
from qurl_megatron.checkpoints.to_huggingface import output_files
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
    """The job that writes a quantized Hugging Face checkpoint.

    Args:
        scheme: "int8", "fp8" or "fp8_block".
        fmt: the layout, one of ``quant.export.FORMATS``.
        backend: whose arithmetic makes the codes, one of ``BACKENDS``.
        uaq_scale: factor to fold in on the way (paper Eq. 11).
        dtype: format of what is not quantized; None is the model's own.
        file_bytes: where a file is full.

    Raises:
        ConfigError: no engine loads the scheme in the layout, or the backend does not make it, or
            the checkpoint is not what its config says.
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
        for name, tensor in read_tensors(source, op, folding(uaq_scale), kept).items():
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
    """The linear modules that stay in high precision: the output layer and the routers."""
    routers = [
        f"model.layers.{layer}.mlp.gate"
        for layer in range(source.arch.num_layers if source.arch.experts else 0)
    ]
    return ["lm_head", *routers]
