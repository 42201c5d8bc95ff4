"""Read slices of a Hugging Face checkpoint: safetensors only, one tensor or part at a time."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qurl_megatron.checkpoints.ops import Op
from qurl_megatron.checkpoints.places import INDEX, safetensors_files
from qurl_megatron.kit.disk import read_json
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.formats_on_disk import DTYPES
from qurl_megatron.tensors.table import HfTensor

# A file is opened again after this many bytes: what was read stays mapped until it is closed.
_MAPPED_BYTES = 256 << 20

LFS_POINTER = b"version https://git-lfs"

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Those of weights in high precision."""


@dataclass(frozen=True)
class Stored:
    """What the header of a file says of one tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class HfReader:
    """The tensors of a checkpoint folder by name, whole or as tensor-parallel slices."""

    def __init__(self, folder: str | Path) -> None:
        """Read the headers of all files.

        Raises:
            ConfigError: no safetensors, one that is missing or cut off, or a format not in
                ``DTYPES``.
        """
        self.folder = Path(folder)
        self._stored: dict[str, Stored] = {}
        for file in safetensors_files(self.folder):
            for name, stored in _header(file):
                if name in self._stored:
                    raise ConfigError(
                        f"tensor {name} is in {self._stored[name].file} and in {file}; remove one"
                    )
                self._stored[name] = stored
        self._check_index()
        self._open: tuple[Path, Any] | None = None
        self._mapped = 0

    def _check_index(self) -> None:
        path = self.folder / INDEX
        if not path.is_file():
            return
        for name, file in read_json(path)["weight_map"].items():
            if name not in self._stored or self._stored[name].file.name != file:
                raise ConfigError(f"{path} says that {file} has tensor {name}, which it has not")

    def names(self) -> set[str]:
        return set(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored(name).shape

    def stored(self, name: str) -> Stored:
        if name not in self._stored:
            raise ConfigError(f"tensor {name} is not in the checkpoint {self.folder}")
        return self._stored[name]

    def shards(
        self, op: Op, *, rank: int = 0, size: int = 1, padded_vocab: int | None = None
    ) -> dict[str, Tensor]:
        """The Hugging Face tensors of an op, or slice ``rank`` of ``size`` of each."""
        return {
            tensor.name: self.read(tensor, rank, size, padded_vocab if tensor.vocabulary else None)
            for tensor in op.hf
        }

    def read(
        self, tensor: HfTensor, rank: int = 0, size: int = 1, rows: int | None = None
    ) -> Tensor:
        """Slice ``rank`` of ``size`` equal ones along the tensor's split dimension.

        Args:
            rows: for a vocabulary padded to ``rows``, the padded length of dimension 0; the
                rows beyond the stored ones are zero.
        """
        source = self._slice(tensor.name)
        if tensor.split_dim is None or size == 1 and rows is None:
            return source[...]
        length = source.get_shape()[tensor.split_dim]
        step = (rows or length) // size
        start, stop = min(rank * step, length - 1), min((rank + 1) * step, length)
        if rank * step >= length:  # nothing but padding
            return source[start:stop].new_zeros(step, *source.get_shape()[1:])
        part = source[start:stop] if tensor.split_dim == 0 else source[:, start:stop]
        if rows is None or part.shape[0] == step:
            return part
        return torch.cat([part, part.new_zeros(step - part.shape[0], *part.shape[1:])])

    def whole(self, name: str) -> Tensor:
        """A tensor as it is stored, mapped from its file."""
        return self._slice(name)[...]

    def _slice(self, name: str):
        stored = self.stored(name)
        if self._open is None or self._open[0] != stored.file or self._mapped > _MAPPED_BYTES:
            self._open = (stored.file, opened(stored.file))
            self._mapped = 0
        self._mapped += stored.dtype.itemsize * torch.Size(stored.shape).numel()
        return self._open[1].get_slice(name)


def _header(file: Path) -> Iterable[tuple[str, Stored]]:
    reader = opened(file)
    for name in reader.keys():  # noqa: SIM118  a reader is no dict: only keys() lists it
        part = reader.get_slice(name)
        dtype = DTYPES.get(part.get_dtype())
        if dtype is None:
            raise ConfigError(
                f"tensor {name} in {file} is stored as {part.get_dtype()}; "
                f"known are {', '.join(DTYPES)}"
            )
        yield name, Stored(file, tuple(part.get_shape()), dtype)


def opened(file: Path):
    """Return the safetensors file as ``safe_open`` does.

    Raises:
        ConfigError: it is damaged, or stands for a file that was never fetched.
    """
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        with file.open("rb") as content:
            if content.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ConfigError(
                    f"{file} holds no weights but a note of Git LFS; run `git lfs pull` in "
                    f"{file.parent}, or copy the file itself"
                ) from None
        raise ConfigError(
            f"{file} cannot be read ({error}); it is damaged or cut off, copy it again"
        ) from None
