"""Megatron -> Hugging Face, from whatever layout: read an op's parameter, take it apart, unfold."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.convert.job import Job, OutputFile
from qurl_megatron.convert.source import (
    check_source,
    config_dtype,
    fingerprint,
    read_tensors,
    with_dtype,
)
from qurl_megatron.weights.checkpoint import Checkpoint, describe, hf_shapes, with_scale
from qurl_megatron.weights.hf_writer import (
    Group,
    TensorSpec,
    plan_files,
    write_index,
    write_safetensors,
)
from qurl_megatron.weights.ops import Op


def to_huggingface(
    source: Checkpoint,
    out: Path,
    *,
    unfold: bool = False,
    dtype: torch.dtype | None = None,
    file_bytes: int = 5 << 30,
) -> Job:
    """The job that writes a Hugging Face checkpoint of a Megatron one.

    Args:
        unfold: take the UAQ factor out again, in FP32; without, the weights stay folded and
            config.json says so.
        dtype: format of the weights; None is the one the model came in where no factor is left in
            them, else the stored one.
        file_bytes: where a file is full.

    Raises:
        ConfigError: the checkpoint is not what its config says.
    """
    check_source(source)
    scale = source.uaq_scale
    left = 1.0 if unfold else scale
    shapes = hf_shapes(source.arch)

    def group(op: Op) -> Group:
        form = dtype or (config_dtype(source) if left == 1.0 else source.dtype(op))
        return Group(op, tuple(TensorSpec(t.name, shapes[t.name], form) for t in op.hf))

    def make(op: Op) -> dict[str, Tensor]:
        made = read_tensors(source, op, unfold=scale if unfold else 1.0)
        return {spec.name: made[spec.name].to(spec.dtype) for spec in group(op).tensors}

    planned = plan_files([group(op) for op in source.ops()], file_bytes)
    config = with_dtype(with_scale(source.config, left), planned[0].groups[0].tensors[0].dtype)

    def finish(folder: Path, _: dict[str, Any]) -> None:
        write_index(folder, planned)
        describe(source, folder, config)

    files = [
        OutputFile(
            file.name,
            file.bytes,
            lambda path, file=file: write_safetensors(path, file.groups, make),
        )
        for file in planned
    ]
    request = {
        "kind": "huggingface",
        "source": fingerprint(source),
        "unfold": unfold,
        "dtype": str(dtype) if dtype else "auto",
        "file_bytes": file_bytes,
    }
    return Job(out, request, files, finish)
