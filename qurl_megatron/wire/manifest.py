"""A published weight version: a folder of safetensors files and the manifest that makes it whole.

    v000012/
      manifest.json                  written last; a folder without it does not exist for readers
      pp0-tp0-b00000.safetensors     one file per training rank and bucket, tensors under their
      pp0-tp1-b00000.safetensors     Hugging Face names

The manifest gives every tensor's whole shape, where its slices lie, and each slice's XXH3-128: that
finds damage, not malice. Readers join slices, so an engine needs no idea of how the trainer is laid
out. Nothing here is ever unpickled.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.wire import schema
from qurl_megatron.wire.message import Blob, checksum, is_dtype, is_shape

FORMAT = "qurl-version-2"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class SliceEntry:
    """Where one rank's slice of a tensor lies."""

    file: str
    start: int  # along the split dimension
    length: int
    checksum: str


@dataclass(frozen=True)
class TensorEntry:
    """One whole tensor: ``slices`` tile ``shape[split_dim]`` without gap or overlap."""

    shape: tuple[int, ...]
    dtype: str  # torch's name, e.g. "int8"
    split_dim: int | None  # None: one slice holds the whole tensor
    slices: tuple[SliceEntry, ...]

    def __post_init__(self) -> None:
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ConfigError(f"{self.dtype!r} is not a number format of torch")
        if self.split_dim is not None and not 0 <= self.split_dim < len(self.shape):
            raise ConfigError(
                f"split_dim {self.split_dim} is not a dimension of {list(self.shape)}"
            )
        if self.split_dim is None:
            covered = [(0, 1)] if len(self.slices) == 1 else []
            end = 1
        else:
            covered = sorted((s.start, s.start + s.length) for s in self.slices)
            end = self.shape[self.split_dim]
        starts = [0, *(stop for _, stop in covered)]
        if starts != [start for start, _ in covered] + [end]:
            raise ConfigError(f"slices {covered} do not tile a dimension of {end}")


@dataclass(frozen=True)
class Manifest:
    version: int
    scheme: str  # "none" | "int8" | "fp8"
    files: dict[str, int]  # name -> bytes
    tensors: dict[str, TensorEntry]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)})

    def write(self, folder: Path) -> None:
        """Write aside, sync, rename: after this call the version exists, before it it does not."""
        aside = folder / f"{MANIFEST}.tmp"
        with aside.open("w", encoding="utf-8") as out:
            out.write(self.to_json())
            out.flush()
            os.fsync(out.fileno())
        aside.rename(folder / MANIFEST)

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """Read and check a manifest.

        Raises:
            ConfigError: no manifest (no version, or an unfinished one), or a malformed one.
        """
        path = folder / MANIFEST
        try:
            raw = schema.parse(path.read_bytes())
            if schema.record(raw) and raw.pop("format", None) != FORMAT:
                raise ConfigError(f"{path} is not of format {FORMAT}")
            raw = schema.fields(raw, _MANIFEST)
            tensors = {name: _entry(name, entry) for name, entry in raw["tensors"].items()}
            bytes_in_files = sum(raw["files"].values())
            for name, entry in tensors.items():  # room is made for it before its parts are read
                if getattr(torch, entry.dtype).itemsize * math.prod(entry.shape) > bytes_in_files:
                    raise schema.Malformed(
                        f"{schema.shortened(name)} is larger than all files together"
                    )
            return Manifest(**{**raw, "tensors": tensors})
        except FileNotFoundError:
            raise ConfigError(
                f"{folder} has no {MANIFEST}: not a published version, or an unfinished one"
            ) from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror})") from None
        except schema.Malformed as error:
            raise ConfigError(f"{path} is malformed: {error}") from None


def _entry(name: str, raw: dict) -> TensorEntry:
    raw = schema.fields(raw, _ENTRY)
    slices = tuple(SliceEntry(**schema.fields(part, _SLICE)) for part in raw["slices"])
    try:
        return TensorEntry(tuple(raw["shape"]), raw["dtype"], raw["split_dim"], slices)
    except ConfigError as error:
        raise schema.Malformed(f"{schema.shortened(name)}: {error}") from None


def _files(value: Any) -> bool:
    """Names in the folder itself, and their sizes."""
    return schema.map_of(schema.count)(value) and all(
        name and name == Path(name).name and "\0" not in name for name in value
    )


_MANIFEST: dict[str, schema.Range] = {
    "version": schema.count,
    "scheme": schema.text,
    "files": _files,
    "tensors": schema.map_of(schema.record),
}
_ENTRY: dict[str, schema.Range] = {
    "shape": is_shape,
    "dtype": is_dtype,
    "split_dim": schema.or_none(schema.count),
    "slices": schema.list_of(schema.record),
}
_SLICE: dict[str, schema.Range] = {
    "file": schema.text,
    "start": schema.count,
    "length": schema.count,
    "checksum": schema.text,
}


def manifest_of(
    version: int, scheme: str, blobs: Iterable[Blob], shapes: Mapping[str, tuple[int, ...]]
) -> Manifest:
    """The whole version that the blobs of all ranks and buckets make up, sent by ``files``.

    Args:
        shapes: of the whole tensors, by name; they must be these and no others.

    Raises:
        ConfigError: a tensor is missing, unknown, or its slices do not tile it; names it.
    """
    files: dict[str, Any] = {}
    slices: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for blob in blobs:
        file = Path(blob.where["path"]).name
        files[file] = blob.where["offset"] + blob.bytes
        for piece in blob.pieces:
            if 0 in piece.shape:
                continue  # a rank that holds vocabulary padding alone
            length = piece.stop - piece.start
            part = SliceEntry(file, piece.start, length, piece.checksum)
            slices.setdefault(piece.name, []).append(part)
            facts.setdefault(piece.name, (piece.dtype, piece.dim))
    if slices.keys() != shapes.keys():
        names = ", ".join(sorted(slices.keys() ^ shapes.keys()))
        raise ConfigError(f"version {version} lacks, or should not have, {names}")
    tensors = {}
    for name, parts in slices.items():
        dtype, dim = facts[name]
        parts.sort(key=lambda part: part.start)
        try:
            tensors[name] = TensorEntry(tuple(shapes[name]), dtype, dim, tuple(parts))
        except ConfigError as error:
            raise ConfigError(f"version {version}, tensor {name}: {error}") from None
    return Manifest(version, scheme, files, tensors)


def read_version(folder: Path, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a version, joined from its slices, one at a time.

    Every file's size is verified before the first tensor is yielded, and every slice's checksum
    before the tensor that it is a part of.

    Raises:
        ConfigError: a file or tensor is missing, truncated, corrupt or misshapen; names it.
    """
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise ConfigError(
                f"{path} is missing or not {size} bytes long; "
                f"version {manifest.version} is unusable"
            )
    readers = {name: _open(folder / name) for name in manifest.files}
    for name, entry in manifest.tensors.items():
        yield name, _join(folder, name, entry, readers)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ConfigError(f"{path} is corrupt: {error}") from None


def _join(folder: Path, name: str, entry: TensorEntry, readers: dict[str, safe_open]) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    joined = None
    for part in entry.slices:
        if part.file not in readers or name not in readers[part.file].keys():  # noqa: SIM118
            raise ConfigError(f"tensor {name} is not in {part.file}, where the manifest puts it")
        tensor = readers[part.file].get_tensor(name)
        expected = list(entry.shape)
        if entry.split_dim is not None:
            expected[entry.split_dim] = part.length
        if list(tensor.shape) != expected or tensor.dtype != dtype:
            raise ConfigError(
                f"tensor {name} in {part.file} is {tensor.dtype} {list(tensor.shape)}, "
                f"the manifest says {dtype} {expected}"
            )
        if checksum(tensor) != part.checksum:
            raise ConfigError(
                f"tensor {name} in {folder / part.file} does not have the checksum of its "
                "manifest: the file is corrupt"
            )
        if len(entry.slices) == 1:
            return tensor
        if joined is None:
            joined = torch.empty(entry.shape, dtype=dtype)
        joined.narrow(entry.split_dim or 0, part.start, part.length).copy_(tensor)
    assert joined is not None, "an entry has slices"
    return joined
