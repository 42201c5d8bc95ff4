"""The manifest that makes a folder of safetensors files a published weight version.

    v000012/
      manifest.json                  written last; a folder without it is not a version
      pp0-tp0-b00000.safetensors     one file per training rank and bucket, tensors under their
      pp0-tp1-b00000.safetensors     Hugging Face names

It gives every tensor's whole shape, where its slices lie, and each slice's XXH3-128, so a reader
needs no idea of how the trainer is laid out.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.record import Count, Record
from qurl_megatron.wire.message import Blob

FORMAT = "qurl-version-2"
MANIFEST = "manifest.json"


class SliceEntry(Record, frozen=True):
    """Where one rank's slice of a tensor lies."""

    file: str
    start: Count  # along the split dimension
    length: Count
    checksum: str


class TensorEntry(Record, frozen=True):
    """One whole tensor: ``slices`` tile ``shape[split_dim]`` without gap or overlap."""

    shape: tuple[Count, ...]
    dtype: str  # torch's name, e.g. "int8"
    split_dim: Count | None  # None: one slice holds the whole tensor
    slices: tuple[SliceEntry, ...]

    def __post_init__(self) -> None:
        length = 1 if self.split_dim is None else self.shape[self.split_dim]
        end = 0
        for part in self.slices:
            if part.start != end:
                break
            end += part.length
        else:
            if end == length:
                return
        covered = [(part.start, part.start + part.length) for part in self.slices]
        raise ValueError(f"slices {covered} do not tile a dimension of {length}")


class Manifest(Record, frozen=True, tag_field="format", tag=FORMAT):
    version: Count
    scheme: str  # "none" | "int8" | "fp8"
    files: dict[str, Count]  # name -> bytes
    tensors: dict[str, TensorEntry]


def manifest_of(
    version: int, scheme: str, blobs: Iterable[Blob], shapes: Mapping[str, tuple[int, ...]]
) -> Manifest:
    """Describe the whole version that the blobs of all ranks and buckets make up.

    Args:
        shapes: of the whole tensors, by name; the blobs must hold these and no others.

    Raises:
        ConfigError: a tensor is missing, unknown, or its slices do not tile it; names it.
    """
    files: dict[str, int] = {}
    slices: dict[str, list[SliceEntry]] = {}
    formats: dict[str, tuple[str, int | None]] = {}
    for blob in blobs:
        file = Path(blob.where["path"]).name
        files[file] = blob.where["offset"] + blob.bytes
        for piece in blob.pieces:
            if 0 in piece.shape:
                continue  # a rank that holds vocabulary padding alone
            length = piece.stop - piece.start
            entry = SliceEntry(file, piece.start, length, piece.checksum)
            slices.setdefault(piece.name, []).append(entry)
            formats.setdefault(piece.name, (piece.dtype, piece.dim))
    if slices.keys() != shapes.keys():
        names = ", ".join(sorted(slices.keys() ^ shapes.keys()))
        raise ConfigError(f"version {version} lacks, or should not have, {names}")
    tensors = {}
    for name, entries in slices.items():
        dtype, dim = formats[name]
        entries.sort(key=lambda entry: entry.start)
        try:
            tensors[name] = TensorEntry(tuple(shapes[name]), dtype, dim, tuple(entries))
        except ValueError as error:
            raise ConfigError(f"version {version}, tensor {name}: {error}") from None
    return Manifest(version, scheme, files, tensors)
