"""A published weight version: a folder of safetensors shards and the manifest that makes it whole.

    v000012/
      manifest.json          written last; a folder without it does not exist for any reader
      pp0-tp0.safetensors    one file per training rank, tensors under their Hugging Face names
      pp0-tp1.safetensors

The manifest gives every tensor's whole shape and where its slices lie, and every file's size and
SHA-256. Readers join slices, so an engine needs no idea of how the trainer is laid out. Nothing
here is ever unpickled.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from qurl_megatron.errors import ConfigError

FORMAT = "qurl-version-1"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Slice:
    """Where one rank's part of a tensor lies."""

    file: str
    offset: int  # along the split dimension
    length: int


@dataclass(frozen=True)
class TensorEntry:
    """One whole tensor: ``slices`` tile ``shape[split_dim]`` without gap or overlap."""

    shape: tuple[int, ...]
    dtype: str  # torch's name, e.g. "int8"
    split_dim: int | None  # None: one slice holds the whole tensor
    slices: tuple[Slice, ...]

    def __post_init__(self) -> None:
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ConfigError(f"{self.dtype!r} is not a number format of torch")
        if self.split_dim is not None and not 0 <= self.split_dim < len(self.shape):
            raise ConfigError(f"split_dim {self.split_dim} is no dimension of {list(self.shape)}")
        if self.split_dim is None:
            covered = [(0, 1)] if len(self.slices) == 1 else []
            end = 1
        else:
            covered = sorted((s.offset, s.offset + s.length) for s in self.slices)
            end = self.shape[self.split_dim]
        starts = [0, *(stop for _, stop in covered)]
        if starts != [start for start, _ in covered] + [end]:
            raise ConfigError(f"slices {covered} do not tile a dimension of {end}")


@dataclass(frozen=True)
class FileEntry:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    version: int
    scheme: str  # "none" | "int8" | "fp8"
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]

    def write(self, folder: Path) -> None:
        """Write aside, sync, rename: after this call the version exists, before it it does not."""
        aside = folder / f"{MANIFEST}.tmp"
        with aside.open("w", encoding="utf-8") as out:
            json.dump({"format": FORMAT, **asdict(self)}, out)
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
            raw = json.loads(path.read_text(encoding="utf-8"))
            if raw.pop("format", None) != FORMAT:
                raise ConfigError(f"{path} is not of format {FORMAT}")
            return Manifest(
                version=int(raw["version"]),
                scheme=str(raw["scheme"]),
                files={name: FileEntry(**entry) for name, entry in raw["files"].items()},
                tensors={
                    name: TensorEntry(
                        shape=tuple(entry["shape"]),
                        dtype=entry["dtype"],
                        split_dim=entry["split_dim"],
                        slices=tuple(Slice(**s) for s in entry["slices"]),
                    )
                    for name, entry in raw["tensors"].items()
                },
            )
        except FileNotFoundError:
            raise ConfigError(
                f"{folder} has no {MANIFEST}: not a published version, or an unfinished one"
            ) from None
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ConfigError(f"{path} is malformed: {error!r}") from None


def write_shard(folder: Path, name: str, tensors: dict[str, Tensor]) -> FileEntry:
    """Write one rank's slices to ``folder/name`` and return what the manifest says of the file."""
    path = folder / name
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    return FileEntry(bytes=path.stat().st_size, sha256=_sha256(path))


def read_version(folder: Path, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a version, joined from its slices, one at a time.

    Every file's size and checksum is verified before the first tensor is yielded.

    Raises:
        ConfigError: a file or tensor is missing, truncated, corrupt or misshapen; names it.
    """
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry.bytes:
            raise ConfigError(
                f"{path} is missing or not {entry.bytes} bytes long; "
                f"version {manifest.version} is unusable"
            )
        if _sha256(path) != entry.sha256:
            raise ConfigError(
                f"{path} does not have the SHA-256 of its manifest; "
                f"version {manifest.version} is corrupt"
            )
    readers = {name: safe_open(folder / name, framework="pt") for name in manifest.files}
    for name, entry in manifest.tensors.items():
        yield name, _join(name, entry, readers)


def _join(name: str, entry: TensorEntry, readers: dict[str, safe_open]) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    whole = None
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
        if len(entry.slices) == 1:
            return tensor
        if whole is None:
            whole = torch.empty(entry.shape, dtype=dtype)
        whole.narrow(entry.split_dim, part.offset, part.length).copy_(tensor)
    return whole


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
