"""Read and write the safetensors of a Hugging Face folder, one tensor or slice at a time.

A safetensors file is 8 bytes (the length of the header), a JSON header that says where each tensor
lies, and the tensors without gaps. Shapes and number formats are known before any data is read, so
the header goes first and tensors follow in whatever order they are made.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qurl_megatron.checkpoints.ops import Op, hf_shapes
from qurl_megatron.checkpoints.places import INDEX, SINGLE, safetensors_files
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import Arch
from qurl_megatron.tensors.table import HfTensor

LFS_POINTER = b"version https://git-lfs"

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""The number formats of safetensors that checkpoints of this package may hold."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Number formats of weights in high precision."""


@dataclass(frozen=True)
class Stored:
    """One tensor as the header of its file describes it."""

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
        self.stored: dict[str, Stored] = {}
        for file in safetensors_files(self.folder):
            reader = opened(file)
            for name in reader.keys():  # noqa: SIM118  a reader is no dict: only keys() lists it
                part = reader.get_slice(name)
                dtype = DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise ConfigError(
                        f"tensor {name} in {file} is stored as {part.get_dtype()}; "
                        f"known are {', '.join(DTYPES)}"
                    )
                if name in self.stored:
                    raise ConfigError(
                        f"tensor {name} is in {self.stored[name].file} and in {file}; remove one"
                    )
                self.stored[name] = Stored(file, tuple(part.get_shape()), dtype)

    def dtype(self, op: Op) -> torch.dtype:
        """Return the format of an op's tensors; FP32 where they differ."""
        dtypes = {self.stored[tensor.name].dtype for tensor in op.hf}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    widest = dtype
    """Return the format that an op's tensors are read in: here there are no wider masters."""

    def check(self, arch: Arch) -> None:
        """Compare every tensor's name, shape and format with the config, from headers alone.

        Raises:
            ConfigError: one is missing, or is left over, or has another shape or format; or a tied
                output layer is not its twin.
        """
        shapes = hf_shapes(arch)
        missing = sorted(shapes.keys() - self.stored.keys())
        if missing:
            raise ConfigError(
                f"tensor {missing[0]} is not in {self.folder}"
                f"{_and_more(missing)}; config.json says it must be"
            )
        extra = sorted(
            name
            for name in self.stored.keys() - shapes.keys()
            if not name.endswith(".inv_freq") and not (arch.tied and name == HEAD)
        )
        if extra:
            raise ConfigError(
                f"tensor {extra[0]} in {self.folder} is not part of a model of type "
                f"{arch.family}{_and_more(extra)}; it would be lost"
            )
        for name, shape in shapes.items():
            stored = self.stored[name]
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
        tied_head = arch.tied and HEAD in self.stored
        if tied_head and not torch.equal(self.whole(EMBEDDING), self.whole(HEAD)):
            raise ConfigError(
                f"tensor {HEAD} in {self.folder} is not {EMBEDDING}, but config.json says "
                "tie_word_embeddings=true; set it to false"
            )

    def shards(
        self, op: Op, *, rank: int = 0, size: int = 1, padded_vocab: int | None = None
    ) -> dict[str, Tensor]:
        """Return the Hugging Face tensors of an op, or slice ``rank`` of ``size`` of each."""
        return {
            tensor.name: self.read(tensor, rank, size, padded_vocab if tensor.vocabulary else None)
            for tensor in op.hf
        }

    def read(
        self, tensor: HfTensor, rank: int = 0, size: int = 1, rows: int | None = None
    ) -> Tensor:
        """Return slice ``rank`` of ``size`` equal ones along the tensor's split dimension.

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
        """Return a tensor as it is stored, mapped from its file."""
        return self._slice(name)[...]

    def _slice(self, name: str):
        if name not in self.stored:
            raise ConfigError(f"tensor {name} is not in the checkpoint {self.folder}")
        # Opened anew for each tensor: bytes that are read stay mapped until the file is closed.
        return opened(self.stored[name].file).get_slice(name)


def _and_more(names: list[str]) -> str:
    return f" (nor {len(names) - 1} more)" if len(names) > 1 else ""


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


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path: Path, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write one file.

    Args:
        specs: all tensors of the file.
        tensors: their values by name, in any order; each is written before the next is asked for.
    """
    # Wide formats first: then every tensor starts on a multiple of its element's size.
    planned = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in planned:
        start, end = end, end + spec.bytes
        header[spec.name] = {
            "dtype": NAMES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    by_name = {spec.name: spec for spec in specs}
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        data = file.tell()
        for name, tensor in tensors:
            spec = by_name[name]
            assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype), name
            file.seek(data + header[name]["data_offsets"][0])
            file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.ftruncate(file.fileno(), data + end)


def write_index(folder: Path, files: Mapping[str, Sequence[TensorSpec]]) -> None:
    """Write the index from tensors to files; a single file needs none."""
    if list(files) == [SINGLE]:
        return
    places = {spec.name: name for name, specs in files.items() for spec in specs}
    total = sum(spec.bytes for specs in files.values() for spec in specs)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
