"""Write a Hugging Face checkpoint as safetensors files, one tensor in memory at a time.

A safetensors file is 8 bytes (the length of the header), a JSON header that says where each tensor
lies, and the tensors without gaps. Shapes and number formats are known before any data is read, so
the header goes first and tensors follow in whatever order they are made.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import torch
from torch import Tensor

from qurl_megatron.checkpoints.places import INDEX, SINGLE
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.formats_on_disk import NAMES

Origin = TypeVar("Origin")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorGroup(Generic[Origin]):
    """Tensors that are made together, and what tells the maker which."""

    source: Origin
    tensors: tuple[TensorSpec, ...]

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)


@dataclass(frozen=True)
class HfFile(Generic[Origin]):
    """One safetensors file to come."""

    name: str
    groups: tuple[TensorGroup[Origin], ...]

    @property
    def bytes(self) -> int:
        return sum(group.bytes for group in self.groups)


def plan_files(groups: Sequence[TensorGroup[Origin]], max_bytes: int) -> list[HfFile[Origin]]:
    """Fill files in order, none above ``max_bytes`` unless one group alone is larger."""
    batches: list[list[TensorGroup[Origin]]] = []
    room = 0
    for group in groups:
        if not batches or group.bytes > room:
            batches.append([])
            room = max_bytes
        batches[-1].append(group)
        room -= group.bytes
    if len(batches) == 1:
        return [HfFile(SINGLE, tuple(batches[0]))]
    count = len(batches)
    return [
        HfFile(f"model-{number:05}-of-{count:05}.safetensors", tuple(batch))
        for number, batch in enumerate(batches, start=1)
    ]


def write_safetensors(
    path: Path,
    groups: Iterable[TensorGroup[Origin]],
    make: Callable[[Origin], Mapping[str, Tensor]],
) -> None:
    """Write one file.

    Args:
        make: ``make(group.source)`` are the tensors of the group, by name.

    Raises:
        ConfigError: ``make`` returns another shape or format than was planned.
    """
    groups = tuple(groups)
    # Wide formats first: then every tensor starts on a multiple of its element's size.
    planned = sorted((t for g in groups for t in g.tensors), key=lambda t: -t.dtype.itemsize)
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in planned:
        start, end = end, end + tensor.bytes
        header[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        data = file.tell()
        for group in groups:
            tensors_of_group = make(group.source)
            for spec in group.tensors:
                file.seek(data + header[spec.name]["data_offsets"][0])
                _write(file, spec, tensors_of_group[spec.name])
        file.flush()
        os.ftruncate(file.fileno(), data + end)


def write_index(folder: Path, files: Sequence[HfFile]) -> None:
    """Say which file holds which tensor; a single file needs no index."""
    if [file.name for file in files] == [SINGLE]:
        return
    places = {t.name: file.name for file in files for g in file.groups for t in g.tensors}
    index = {
        "metadata": {"total_size": sum(file.bytes for file in files)},
        "weight_map": dict(sorted(places.items())),
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write(file: BinaryIO, spec: TensorSpec, tensor: Tensor) -> None:
    if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
        raise ConfigError(
            f"tensor {spec.name} came out as {tensor.dtype} {list(tensor.shape)}, "
            f"planned were {spec.dtype} {list(spec.shape)}"
        )
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    file.write(data.numpy().data)
