"""A checkpoint on disk, Hugging Face or Megatron, as one thing: a config, an arch, ops, a reader.

A Megatron checkpoint of this package carries a folder ``hf`` with the model's config.json, which
also records the UAQ factor, and its tokenizer; one made elsewhere is read with another folder's.

Conversions read it one op at a time with ``read_tensors``: checked, folded in FP32, then rounded.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.checkpoints.huggingface import FLOATS, HfReader
from qurl_megatron.checkpoints.integrity import FIX, MANIFEST, RECORD, read_record, wrong_size
from qurl_megatron.checkpoints.megatron_reader import MegatronReader
from qurl_megatron.checkpoints.ops import Op, ops_on_disk
from qurl_megatron.checkpoints.places import description_of, find_torch_dist
from qurl_megatron.checkpoints.uaq import folded, folded_scale, unfolded
from qurl_megatron.kit.errors import ConfigError, reading
from qurl_megatron.quant.export import read_quantization
from qurl_megatron.tensors.arch import Arch, arch_of, read_config
from qurl_megatron.tensors.table import uaq_role

DTYPES_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}

Reader = HfReader | MegatronReader
"""Where the Hugging Face tensors of an op come from."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint; nothing but headers has been read."""

    folder: Path
    description: Path  # the folder with config.json and the tokenizer
    config: dict[str, Any]
    arch: Arch
    reader: Reader
    scheme: str = ""  # if it is quantized

    @property
    def uaq_scale(self) -> float:
        """UAQ factor folded into the stored weights; 1.0: none."""
        return folded_scale(self.config)

    def ops(self) -> list[Op]:
        """Return all ops of the model, in the order of its layers, by Megatron's names on disk."""
        return ops_on_disk(self.arch)

    def natural_dtype(self, op: Op) -> torch.dtype:
        """Return the model's original format, before folding needed a wider one."""
        recorded = self.config.get("qurl", {}).get("dtype")
        return DTYPES_BY_NAME.get(recorded) or self.reader.dtype(op)

    def folded_config(self, scale: float) -> dict[str, Any]:
        """Return the config for weights with ``scale`` folded in; it records the factor and the
        model's original format. An unfolded model needs no record."""
        plain = {key: value for key, value in self.config.items() if key != "qurl"}
        if scale == 1.0:
            return plain
        record: dict[str, Any] = {"uaq_scale": scale}
        formats = {self.natural_dtype(op) for op in self.ops()}
        if len(formats) == 1:
            record["dtype"] = str(formats.pop()).removeprefix("torch.")
        return {**plain, "qurl": record}


def open_checkpoint(
    folder: str | Path, description: str | Path | None = None, *, quantized: bool = False
) -> Checkpoint:
    """Open a Hugging Face folder, a ``torch_dist`` folder, or a run's newest checkpoint.

    Args:
        description: Hugging Face folder with config.json and tokenizer, for a Megatron checkpoint
            that carries none of its own.
        quantized: allow quantized weights, in a layout that this package exports.

    Raises:
        ConfigError: there is no checkpoint, or it is not understood.
    """
    folder = Path(folder)
    megatron = find_torch_dist(folder)
    if megatron is None:
        config, arch = read_config(folder), arch_of(folder, quantized=quantized)
        scheme = read_quantization(config) or ""
        return Checkpoint(folder, folder, config, arch, HfReader(folder), scheme)
    described = Path(description) if description else description_of(folder)
    if wrong := wrong_size(megatron, read_record(megatron) or {}):
        raise ConfigError(f"{wrong}; {FIX}")
    config, arch = read_config(described), arch_of(described)
    return Checkpoint(megatron, described, config, arch, MegatronReader(megatron, arch))


def describe(source: Checkpoint, folder: Path, config: dict[str, Any]) -> None:
    """Write ``config`` into a folder, beside copies of the source's tokenizer and generation files.

    Weights are left out, and so is everything that could be code.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generated = {"config.json", "hf_quant_config.json", MANIFEST, "state.json", RECORD}
    for path in sorted(source.description.iterdir()):
        if path.name in generated or "index.json" in path.name or not path.is_file():
            continue
        if path.suffix in (".json", ".txt", ".model", ".jinja", ".tiktoken"):
            with reading(path):
                content = path.read_bytes()
            (folder / path.name).write_bytes(content)
    write_json(folder / "config.json", config)


def write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def read_tensors(
    source: Checkpoint, op: Op, dtype: torch.dtype | None, *, fold: float = 1.0, unfold: float = 1.0
) -> dict[str, Tensor]:
    """Return the whole Hugging Face tensors of an op, changed in FP32, then rounded to ``dtype``.

    Args:
        dtype: None leaves them as wide as they are.
        fold, unfold: UAQ factor to fold into the tensors that take part, or to take out of them.

    Raises:
        ConfigError: a tensor has inf or nan, as it is stored or as it is rounded.
    """
    tensors = source.reader.shards(op)
    for tensor in op.hf:
        name = tensor.name
        value = tensors[name]
        if not is_finite(value):
            raise ConfigError(
                f"tensor {name} in {source.folder} has inf or nan; the checkpoint is of a run that "
                "diverged, or is damaged"
            )
        if uaq_role(name) and not fold == unfold == 1.0:
            value = folded(name, value.float(), fold)
            value = unfolded(name, value, unfold)
        if dtype is not None:
            value = value.to(dtype)
        if dtype == torch.float16 and not is_finite(value):
            raise ConfigError(f"tensor {name} has values that float16 cannot hold; use bfloat16")
        tensors[name] = value
    return tensors


def is_finite(tensor: Tensor) -> bool:
    # The extremes of a tensor with nan are nan; ten times faster than asking every element.
    return not tensor.numel() or all(math.isfinite(x.item()) for x in torch.aminmax(tensor))


def with_dtype(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return a config that names ``dtype``, under the key it uses for that."""
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return {**config, key: str(dtype).removeprefix("torch.")}
