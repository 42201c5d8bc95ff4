"""Megatron's ``torch_dist`` checkpoint format, read and written one chunk at a time.

    iter/
      metadata.json      which format this is
      common.pt          small facts about the whole checkpoint
      .metadata          where every chunk of every tensor lies (pickle of torch's own dataclasses)
      __0_0.distcp       chunks, each a ``torch.save`` of one tensor, back to back

Megatron's own loader needs the whole model's modules and its saver needs their tensors in memory; a
converter has neither. The layout is torch.distributed.checkpoint's, and a test loads what is
written here with megatron-core, and reads here what megatron-core wrote.

Nothing that a file names is ever executed: ``.metadata`` may only name the classes listed below,
and chunks are loaded as weights alone.
"""

import io
import json
import math
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner

from qurl_megatron.errors import ConfigError

METADATA = ".metadata"
_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# How Megatron is told to lay out the keys; its loader asks for the same.
CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}

Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offsets, sizes) within a whole tensor


@dataclass(frozen=True)
class Chunk:
    """One stored part of a tensor; without ``shape``, an object that is no tensor."""

    key: str
    shape: tuple[int, ...] | None = None  # of the whole tensor
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize if self.shape is not None else 0


# -- reading -------------------------------------------------------------------------------------


def is_torch_dist(folder: Path) -> bool:
    """True where a folder holds a checkpoint of this format."""
    return (folder / METADATA).is_file() and (folder / "metadata.json").is_file()


class TorchDistReader:
    """The tensors of a ``torch_dist`` folder by key; any box of them."""

    def __init__(self, folder: Path) -> None:
        """Read the table of contents.

        Raises:
            ConfigError: the folder is not of this format, or names classes that tables of contents
                have no use for.
        """
        self.folder = folder
        config = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
        if config.get("sharded_backend") != "torch_dist":
            raise ConfigError(
                f"{folder} is of Megatron's format {config.get('sharded_backend')!r}; "
                "only torch_dist is read"
            )
        table = _read_table(folder / METADATA)
        self._tensors = {
            key: entry
            for key, entry in table.state_dict_metadata.items()
            if isinstance(entry, metadata.TensorStorageMetadata)
        }
        self._place = {
            (index.fqn, tuple(index.offset)): info
            for index, info in table.storage_data.items()
            if index.offset is not None
        }
        self.files = sorted({info.relative_path for info in table.storage_data.values()})
        for file in self.files:
            if not (folder / file).is_file():
                raise ConfigError(f"{folder / METADATA} names {file}, which is not in {folder}")

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def keys(self) -> list[str]:
        return list(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._tensor(key).size)

    def dtype(self, key: str) -> torch.dtype:
        return self._tensor(key).properties.dtype

    def cuts(self, key: str, index: Sequence[int] = ()) -> int:
        """How many chunks lie under the leading indices ``index`` of a tensor."""
        chunks = self._tensor(key).chunks
        return sum(tuple(chunk.offsets[: len(index)]) == tuple(index) for chunk in chunks)

    def read(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A box of a tensor, joined from the chunks it touches.

        Raises:
            ConfigError: the chunks do not cover the box, or a file is damaged.
        """
        entry, box = self._tensor(key), (tuple(offsets), tuple(sizes))
        out: Tensor | None = None
        covered = 0
        for chunk in entry.chunks:
            own = (tuple(chunk.offsets), tuple(chunk.sizes))
            shared = _overlap(own, box)
            if shared is None:
                continue
            tensor = self._load(key, own)
            if own == box:
                return tensor
            if out is None:
                out = torch.empty(box[1], dtype=entry.properties.dtype)
            out[_within(shared, box)] = tensor[_within(shared, own)]
            covered += math.prod(shared[1])
        if out is None or covered != math.prod(box[1]):
            raise ConfigError(
                f"tensor {key} in {self.folder} is not whole: no chunk holds all of "
                f"{list(box[1])} at {list(box[0])}"
            )
        return out

    def _tensor(self, key: str) -> metadata.TensorStorageMetadata:
        if key not in self._tensors:
            raise ConfigError(f"tensor {key} is not in the checkpoint {self.folder}")
        return self._tensors[key]

    def _load(self, key: str, box: Box) -> Tensor:
        place = self._place[key, box[0]]
        path = self.folder / place.relative_path
        try:
            with path.open("rb", buffering=0) as file:
                window = _Window(file, place.offset, place.length)
                tensor = torch.load(window, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ConfigError(
                f"tensor {key} cannot be read from {path} ({str(error).splitlines()[0]}); "
                "the file is damaged, copy the checkpoint again"
            ) from None
        if tuple(tensor.shape) != box[1]:
            raise ConfigError(
                f"tensor {key} in {path} has shape {list(tensor.shape)}, "
                f"{METADATA} says {list(box[1])}"
            )
        return tensor


def _overlap(a: Box, b: Box) -> Box | None:
    starts = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    stops = [min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True)]
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def _within(inner: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(
        slice(start - origin, start - origin + size)
        for start, size, origin in zip(*inner, outer[0], strict=True)
    )


class _Window(io.RawIOBase):
    """Bytes ``[start, start + length)`` of a file, as a file of their own."""

    def __init__(self, file: io.FileIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = origin + offset
        return self._at

    def readinto(self, buffer) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view)
        self._at += count
        return count


_DATACLASSES = {
    name: getattr(module, name)
    for module, names in (
        (
            metadata,
            "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
            "TensorProperties MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
        ),
        (filesystem, "_StorageInfo"),
        (planner, "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData"),
    )
    for name in names.split()
    if hasattr(module, name)
}


class _TableUnpickler(pickle.Unpickler):
    """Unpickles tables of contents and nothing else: no name outside the list is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        found = _DATACLASSES.get(name)
        if found is not None and found.__module__ == module:
            return found
        if module == "torch":
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype) or found is torch.Size:
                return found
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if module.startswith("pathlib") and name in ("PosixPath", "Path"):
            return Path
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _read_table(path: Path) -> metadata.Metadata:
    try:
        with path.open("rb") as file:
            table = _TableUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{path} is no table of contents of a torch_dist checkpoint: {error}"
        ) from None
    if not isinstance(table, metadata.Metadata):
        raise ConfigError(f"{path} is no table of contents of a torch_dist checkpoint")
    return table


# -- writing -------------------------------------------------------------------------------------


def write_chunks(path: Path, chunks: Iterable[tuple[Chunk, Any]]) -> list[dict[str, Any]]:
    """Write chunks into one file, in the order they come.

    Returns:
        The rows of the table of contents for this file, as JSON; for ``write_table``.
    """
    rows = []
    with path.open("wb") as file:
        for chunk, value in chunks:
            start = file.tell()
            if isinstance(value, Tensor):
                value = value.detach().reshape(chunk.sizes)
                if value.untyped_storage().nbytes() != value.nbytes:
                    value = value.clone()  # torch.save would write the whole storage of a view
            try:
                torch.save(value, file)
            except RuntimeError as error:
                # A full disk: torch reports that its archive cannot be closed after that.
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
            rows.append(
                {
                    "key": chunk.key,
                    "shape": chunk.shape,
                    "offsets": chunk.offsets,
                    "sizes": chunk.sizes,
                    "dtype": str(chunk.dtype).removeprefix("torch."),
                    "start": start,
                    "length": file.tell() - start,
                }
            )
    return rows


def write_table(folder: Path, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Write what makes the files a checkpoint: the table of contents, the common facts, the format.

    Args:
        rows: what ``write_chunks`` returned for each file of the folder.
    """
    tensors: dict[str, Any] = {}
    places: dict[metadata.MetadataIndex, Any] = {}
    for file, row in _flat(rows):
        key, place = row["key"], filesystem._StorageInfo(file, row["start"], row["length"])
        if row["shape"] is None:
            tensors[key] = metadata.BytesStorageMetadata()
            places[metadata.MetadataIndex(key)] = place
            continue
        offsets, sizes = torch.Size(row["offsets"]), torch.Size(row["sizes"])
        entry = tensors.setdefault(
            key,
            metadata.TensorStorageMetadata(
                properties=metadata.TensorProperties(dtype=getattr(torch, row["dtype"])),
                size=torch.Size(row["shape"]),
                chunks=[],
            ),
        )
        entry.chunks.append(metadata.ChunkStorageMetadata(offsets, sizes))
        places[metadata.MetadataIndex(key, offsets)] = place
    table = metadata.Metadata(tensors, storage_data=places)
    with (folder / METADATA).open("wb") as file:
        pickle.dump(table, file)
    torch.save({"content_metadata": CONTENT, "checkpoint_version": 3.0}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(_CONFIG), encoding="utf-8")


def _flat(rows: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted(rows):
        for row in rows[file]:
            yield file, row
