"""Megatron -> Hugging Face, from whatever layout: read an op's parameter, take it apart, unfold."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.checkpoints.hf_writer import (
    HfFile,
    TensorGroup,
    TensorSpec,
    plan_files,
    write_index,
    write_safetensors,
)
from qurl_megatron.checkpoints.job import ConversionJob, OutputFile
from qurl_megatron.checkpoints.ops import Op
from qurl_megatron.checkpoints.read_source import (
    check_source,
    fingerprint,
    read_tensors,
    unfolding,
    with_dtype,
)
from qurl_megatron.checkpoints.source import Checkpoint, describe


def to_huggingface(
    source: Checkpoint,
    out: Path,
    *,
    unfold: bool = False,
    dtype: torch.dtype | None = None,
    file_bytes: int = 5 << 30,
) -> ConversionJob:
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
    remaining = 1.0 if unfold else scale

    def group(op: Op) -> TensorGroup:
        form = dtype or (source.natural_dtype(op) if remaining == 1.0 else source.widest(op))
        return TensorGroup(op, tuple(TensorSpec(t.name, t.shape, form) for t in op.hf))

    def make(op: Op) -> dict[str, Tensor]:
        form = group(op).tensors[0].dtype
        return read_tensors(source, op, unfolding(scale if unfold else 1.0), form)

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
    """The job's part of each safetensors file: ``make`` gives the tensors of an op."""
    return [
        OutputFile(
            file.name,
            file.bytes,
            partial(write_safetensors, groups=file.groups, make=make),
        )
        for file in planned
    ]
