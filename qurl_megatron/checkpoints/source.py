"""A checkpoint on disk, Hugging Face or Megatron, as one thing: a config, an arch, ops, a reader.

A Megatron checkpoint of this package carries a folder ``hf`` with the model's config.json, which
also records the UAQ factor, and its tokenizer; one made elsewhere is read with another folder's.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from qurl_megatron.checkpoints.families import stage_ops
from qurl_megatron.checkpoints.hf_reader import FLOATS, HfReader
from qurl_megatron.checkpoints.integrity import FIX, RECORD, read_record, wrong_size
from qurl_megatron.checkpoints.megatron_reader import MegatronReader
from qurl_megatron.checkpoints.ops import Op
from qurl_megatron.checkpoints.places import description_of, find_torch_dist
from qurl_megatron.checkpoints.shapes import hf_shapes
from qurl_megatron.checkpoints.uaq import folded, folded_scale
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import Arch, arch_of, read_config

DTYPES_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}


class CheckpointReader(Protocol):
    """Where the Hugging Face tensors of an op come from."""

    @property
    def folder(self) -> Path: ...

    def shards(
        self, op: Op, *, rank: int = 0, size: int = 1, padded_vocab: int | None = None
    ) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint in high precision; nothing but headers has been read."""

    folder: Path
    description: Path  # the folder with config.json and the tokenizer
    config: dict[str, Any]
    arch: Arch
    reader: HfReader | MegatronReader

    @property
    def uaq_scale(self) -> float:
        """The factor folded into the stored weights; 1.0 where none is."""
        return folded_scale(self.config)

    def ops(self) -> list[Op]:
        """All ops of the model, in the order of its layers, under Megatron's names on disk."""
        return stage_ops(
            self.arch, range(self.arch.num_layers), first=True, last=True, fused_norms=True
        )

    def dtype(self, op: Op) -> torch.dtype:
        """The number format the model has an op's tensors in; FP32 where they differ."""
        if isinstance(self.reader, MegatronReader):
            return self.reader.dtype(op)
        dtypes = {self.reader.stored(tensor.name).dtype for tensor in op.hf}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def widest(self, op: Op) -> torch.dtype:
        """The format in which an op's tensors are read: of FP32 masters where there are any."""
        reader = self.reader
        return reader.widest(op) if isinstance(reader, MegatronReader) else self.dtype(op)

    def natural_dtype(self, op: Op) -> torch.dtype:
        """The format the model came in, before folding needed a wider one."""
        recorded = self.config.get("qurl", {}).get("dtype")
        return DTYPES_BY_NAME[recorded] if recorded in DTYPES_BY_NAME else self.dtype(op)

    def folded_config(self, scale: float) -> dict[str, Any]:
        """The config of this model with ``scale`` in its weights in all: it says so, and in which
        format the model came. A model that is not folded needs no record."""
        plain = {key: value for key, value in self.config.items() if key != "qurl"}
        if scale == 1.0:
            return plain
        record: dict[str, Any] = {"uaq_scale": scale}
        formats = {self.natural_dtype(op) for op in self.ops()}
        if len(formats) == 1:
            record["dtype"] = str(formats.pop()).removeprefix("torch.")
        return {**plain, "qurl": record}

    def check(self) -> None:
        """Hold every tensor's name, shape and format against the config, from headers alone.

        Raises:
            ConfigError: one is missing, or is left over, or has another shape or format.
        """
        if isinstance(self.reader, MegatronReader):
            self.reader.check(self.ops())
            return
        shapes = hf_shapes(self.arch)
        names = self.reader.names()
        missing = sorted(shapes.keys() - names)
        if missing:
            raise ConfigError(
                f"tensor {missing[0]} is not in {self.folder}"
                f"{_and_more(missing)}; config.json says it must be"
            )
        ignored = {"lm_head.weight"} if self.arch.tied else set()
        extra = sorted(
            name for name in names - shapes.keys() - ignored if not name.endswith(".inv_freq")
        )
        if extra:
            raise ConfigError(
                f"tensor {extra[0]} in {self.folder} is not part of a model of type "
                f"{self.arch.family}{_and_more(extra)}; it would be lost"
            )
        for name, shape in shapes.items():
            stored = self.reader.stored(name)
            if stored.shape != shape:
                raise ConfigError(
                    f"tensor {name} in {stored.file} has shape {list(stored.shape)}, "
                    f"config.json says {list(shape)}"
                )
            if stored.dtype not in FLOATS:
                raise ConfigError(
                    f"tensor {name} in {stored.file} is stored as {stored.dtype}, which is not "
                    "high precision; give the checkpoint it was made from"
                )


def open_checkpoint(folder: str | Path, description: str | Path | None = None) -> Checkpoint:
    """Open a Hugging Face folder, a ``torch_dist`` folder, or a run's newest checkpoint.

    Args:
        description: Hugging Face folder with config.json and tokenizer, for a Megatron checkpoint
            that carries none of its own.

    Raises:
        ConfigError: there is no checkpoint, or one that is not understood.
    """
    folder = Path(folder)
    megatron = find_torch_dist(folder)
    if megatron is None:
        return Checkpoint(folder, folder, read_config(folder), arch_of(folder), HfReader(folder))
    described = Path(description) if description else description_of(folder)
    if wrong := wrong_size(megatron, read_record(megatron) or {}):
        raise ConfigError(f"{wrong}; {FIX}")
    config, arch = read_config(described), arch_of(described)
    return Checkpoint(megatron, described, config, arch, MegatronReader(megatron, arch))


def load_parameter(
    op: Op, reader: CheckpointReader, *, rank: int, size: int, uaq_scale: float, padded_vocab: int
) -> Tensor:
    """One Megatron parameter in FP32: this tensor rank's slices, folded by ``uaq_scale``, fused."""
    slices = reader.shards(op, rank=rank, size=size, padded_vocab=padded_vocab)
    return op.to_megatron(
        {
            tensor.name: folded(
                tensor.name,
                slices[tensor.name].float(),
                uaq_scale,
                zero_centred=tensor.zero_centred,
            )
            for tensor in op.hf
        }
    )


def describe(source: Checkpoint, folder: Path, config: dict[str, Any]) -> None:
    """Write ``config`` into a folder, beside copies of the source's tokenizer and generation files.

    Weights are left out, and so is everything that could be code.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in companions(source.description):
        shutil.copyfile(path, folder / path.name)
    write_json(folder / "config.json", config)


def write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def companions(folder: Path) -> Iterator[Path]:
    """The tokenizer and generation files beside a config.json."""
    generated = {"config.json", "hf_quant_config.json", "qurl_manifest.json", "state.json", RECORD}
    for path in sorted(folder.iterdir()):
        text = path.suffix in (".json", ".txt", ".model", ".jinja", ".tiktoken")
        if path.is_file() and text and path.name not in generated and "index.json" not in path.name:
            yield path


def _and_more(names: list[str]) -> str:
    return f" (nor {len(names) - 1} more)" if len(names) > 1 else ""
