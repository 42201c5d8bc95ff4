"""What every conversion does with its source: read one op's tensors, checked and folded."""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.checkpoints.hf_reader import HfReader
from qurl_megatron.checkpoints.ops import Op
from qurl_megatron.checkpoints.source import Checkpoint, companions
from qurl_megatron.checkpoints.uaq import folded, takes_part, unfolded
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.table import HfTensor

Change = Callable[[HfTensor, Tensor], Tensor]
"""What happens to a tensor between reading and rounding, in FP32."""


def folding(scale: float) -> Change:
    """Fold ``scale`` into the tensors that take part."""
    return _change(folded, scale)


def unfolding(scale: float) -> Change:
    """Take ``scale`` out of the tensors that take part."""
    return _change(unfolded, scale)


def read_tensors(
    source: Checkpoint, op: Op, change: Change, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """The whole Hugging Face tensors of an op, changed in FP32, then rounded to ``dtype``.

    Args:
        dtype: None leaves them as wide as they are.

    Raises:
        ConfigError: a tensor has inf or nan, as it is stored or as it is rounded.
    """
    tensors = source.reader.shards(op)
    for tensor in op.hf:
        name = tensor.name
        if not is_finite(tensors[name]):
            raise ConfigError(
                f"tensor {name} in {source.folder} has inf or nan; the checkpoint is of a run that "
                "diverged, or is damaged"
            )
        changed = change(tensor, tensors[name])
        tensors[name] = changed if dtype is None else changed.to(dtype)
        if dtype == torch.float16 and not is_finite(tensors[name]):
            raise ConfigError(f"tensor {name} has values that float16 cannot hold; use bfloat16")
    return tensors


def _change(function: Callable[..., Tensor], scale: float) -> Change:
    def change(tensor: HfTensor, value: Tensor) -> Tensor:
        if scale == 1.0 or not takes_part(tensor.name):
            return value
        return function(tensor.name, value.float(), scale, zero_centred=tensor.zero_centred)

    return change


def is_finite(tensor: Tensor) -> bool:
    # The extremes of a tensor with nan are nan; ten times faster than asking every element.
    return not tensor.numel() or all(math.isfinite(x.item()) for x in torch.aminmax(tensor))


def check_source(source: Checkpoint) -> None:
    """Hold names, shapes and formats against the config, and a tied output layer against its twin.

    Raises:
        ConfigError: something would be lost or be wrong.
    """
    source.check()
    reader = source.reader
    if source.arch.tied and isinstance(reader, HfReader) and "lm_head.weight" in reader.names():
        embedding, head = reader.whole("model.embed_tokens.weight"), reader.whole("lm_head.weight")
        if not torch.equal(embedding, head):
            raise ConfigError(
                f"tensor lm_head.weight in {source.folder} is not model.embed_tokens.weight, but "
                "config.json says tie_word_embeddings=true; set it to false"
            )


def with_dtype(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A config that names ``dtype``, under the key it uses for that."""
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return {**config, key: str(dtype).removeprefix("torch.")}


def fingerprint(source: Checkpoint) -> dict[str, Any]:
    """What tells a source from another one without reading it: names, sizes and times of files."""
    reader = source.reader
    files = (
        {reader.stored(name).file for name in reader.names()}
        if isinstance(reader, HfReader)
        else {reader.folder / name for name in reader.table.files}
    )
    config = json.dumps(source.config, sort_keys=True)
    return {
        "folder": source.folder.absolute().name,
        "config": hashlib.sha256(config.encode()).hexdigest()[:16],
        "files": dict(sorted(map(_stat, [*files, *companions(source.description)]))),
    }


def _stat(path: Path) -> tuple[str, list[int]]:
    return path.name, [path.stat().st_size, path.stat().st_mtime_ns]
