"""What every conversion does with its source: read one op's tensors, checked and folded."""

import hashlib
import json
import math
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.errors import ConfigError
from qurl_megatron.weights.checkpoint import Checkpoint
from qurl_megatron.weights.hf_reader import HfReader
from qurl_megatron.weights.ops import Op
from qurl_megatron.weights.uaq import folded, takes_part, unfolded


def read_tensors(
    source: Checkpoint, op: Op, *, fold: float = 1.0, unfold: float = 1.0
) -> dict[str, Tensor]:
    """The whole Hugging Face tensors of an op; those that (un)folding changes are in FP32.

    Raises:
        ConfigError: a tensor has inf or nan.
    """
    tensors = source.reader.shards(op)
    for tensor in op.hf:
        name = tensor.name
        if not is_finite(tensors[name]):
            raise ConfigError(
                f"tensor {name} in {source.folder} has inf or nan; the checkpoint is of a run that "
                "diverged, or is damaged"
            )
        if takes_part(name) and not fold == unfold == 1.0:
            centred = tensor.zero_centred
            wide = folded(name, tensors[name].float(), fold, zero_centred=centred)
            tensors[name] = unfolded(name, wide, unfold, zero_centred=centred)
    return tensors


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


def config_dtype(source: Checkpoint) -> torch.dtype:
    """The number format config.json names, else the embedding's."""
    name = source.config.get("dtype") or source.config.get("torch_dtype")
    named = getattr(torch, str(name).removeprefix("torch."), None)
    return named if isinstance(named, torch.dtype) else source.dtype(source.ops()[0])


def with_dtype(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A config that names ``dtype``, under the key it uses for that."""
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return {**config, key: str(dtype).removeprefix("torch.")}


def fingerprint(source: Checkpoint) -> dict[str, Any]:
    """What tells a source from another one without reading it: names, sizes and times of files."""
    reader = source.reader
    files = (
        sorted({reader.stored(name).file for name in reader.names()})
        if isinstance(reader, HfReader)
        else [reader.folder / name for name in reader.table.files]
    )
    stats = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
    config = json.dumps(source.config, sort_keys=True)
    return {
        "folder": source.folder.name,
        "config": hashlib.sha256(config.encode()).hexdigest()[:16],
        "files": stats,
    }
