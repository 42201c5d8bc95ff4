"""Megatron's ``torch_dist`` checkpoint format, read and written one chunk at a time.

    iter/
      metadata.json      which format this is
      common.pt          small facts about the whole checkpoint
      .metadata          where every chunk of every tensor lies (pickle of torch's own dataclasses)
      __0_0.distcp       chunks, each a ``torch.save`` of one tensor, back to back

Megatron's own loader needs the whole model's modules and its saver needs their tensors in memory; a
converter has neither. The layout is torch.distributed.checkpoint's, and tests exchange
checkpoints with megatron-core in both directions.

Nothing that a file names is ever executed: ``.metadata`` becomes inert records, and chunks are
loaded as weights alone.
"""

import io
import itertools
import json
import pickle
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.checkpoints.places import METADATA
from qurl_megatron.kit.disk import read_json
from qurl_megatron.kit.errors import ConfigError, reading
from qurl_megatron.tensors.slice import Slice

_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# How Megatron is told to lay out the keys; its loader asks for the same.
CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}

DAMAGE = (
    *(pickle.UnpicklingError, struct.error, EOFError),
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError),
    RuntimeError,  # torch's own, of archives; recursion
)
"""Errors of pickle and torch on damaged bytes, whatever the bytes are.

Memory that runs out and files the system cannot read are another matter.
"""


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor that is to be stored; without ``shape``, an object that is no tensor."""

    key: str
    shape: tuple[int, ...] | None = None  # of the whole tensor
    part: Slice = Slice((), ())
    dtype: torch.dtype = torch.bfloat16

    @property
    def bytes(self) -> int:
        return self.part.elements * self.dtype.itemsize if self.shape is not None else 0


@dataclass(frozen=True)
class StoredChunk:
    """Where a part of a tensor is stored."""

    part: Slice
    file: str
    start: int
    length: int


class StoredTensor:
    """One tensor as the table of contents describes it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, chunks: list[StoredChunk]):
        self.shape, self.dtype, self.chunks = shape, dtype, chunks
        # Layers and experts are leading axes, and a chunk holds one of each: looked up by them,
        # it is found among a hundred thousand without a search.
        self._depth = min(_ones(chunk.part) for chunk in chunks) if chunks else 0
        self._at: dict[tuple[int, ...], list[StoredChunk]] = {}
        for chunk in chunks:
            self._at.setdefault(chunk.part.starts[: self._depth], []).append(chunk)

    def touched(self, part: Slice) -> list[tuple[StoredChunk, Slice]]:
        """Return the chunks that overlap a part of the tensor, with the overlaps."""
        at = part.starts[: self._depth]
        near = self._at.get(at, []) if _ones(part) >= self._depth else self.chunks
        return [(chunk, common) for chunk in near if (common := chunk.part.overlap(part))]


def _ones(part: Slice) -> int:
    """Count the leading axes of length 1; the last axis does not count."""
    leading = part.sizes[:-1]
    return next((axis for axis, size in enumerate(leading) if size != 1), len(leading))


class TorchDistReader:
    """The tensors of a ``torch_dist`` folder by key; any part of them."""

    def __init__(self, folder: Path) -> None:
        """Read the table of contents.

        Raises:
            ConfigError: the folder is not of this format, or is damaged.
        """
        self.folder = folder
        backend = read_json(folder / "metadata.json").get("sharded_backend")
        if backend != "torch_dist":
            raise ConfigError(
                f"{folder} is of Megatron's format {backend!r}; only torch_dist is read"
            )
        self.tensors = _read_table(folder / METADATA)
        for file in {chunk.file for tensor in self.tensors.values() for chunk in tensor.chunks}:
            if Path(file).name != file or not (folder / file).is_file():
                raise ConfigError(f"{folder / METADATA} names {file}, which is not in {folder}")

    def read(self, key: str, part: Slice) -> Tensor:
        """Return a part of a tensor, joined from the chunks it touches.

        Raises:
            ConfigError: the chunks do not tile the part; a file is damaged or cannot be read; there
                is not enough memory.
        """
        tensor = self.tensors[key]
        touched = tensor.touched(part)
        shared = [common for _, common in touched]
        # Overlaps that are apart and have as many elements as the part cover it.
        apart = not any(a.overlap(b) for a, b in itertools.combinations(shared, 2))
        if not apart or sum(each.elements for each in shared) != part.elements:
            raise ConfigError(
                f"tensor {key} in {self.folder} is not whole: its chunks do not tile "
                f"{list(part.sizes)} at {list(part.starts)}"
            )
        if [chunk.part for chunk, _ in touched] == [part]:
            return self._load(key, tensor, touched[0][0])
        out = torch.empty(part.sizes, dtype=tensor.dtype)
        for chunk, common in touched:
            stored = self._load(key, tensor, chunk)
            common.narrow(out, part).copy_(common.narrow(stored, chunk.part))
        return out

    def _load(self, key: str, tensor: StoredTensor, chunk: StoredChunk) -> Tensor:
        path = self.folder / chunk.file
        try:
            with reading(path), path.open("rb") as file:
                file.seek(chunk.start)
                # A damaged length may ask for more than there is memory.
                content = file.read(min(chunk.length, path.stat().st_size))
            loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except ConfigError:
            raise
        except (*DAMAGE, MemoryError) as error:
            reason = (str(error).splitlines() or [repr(error)])[0]
            if isinstance(error, MemoryError) or "can't allocate memory" in reason:
                raise ConfigError(f"tensor {key} does not fit in memory ({reason})") from None
            raise ConfigError(
                f"tensor {key} cannot be read from {path} ({reason}); the file is damaged, "
                "copy the checkpoint again"
            ) from None
        expected = (chunk.part.sizes, tensor.dtype)
        if not isinstance(loaded, Tensor) or (tuple(loaded.shape), loaded.dtype) != expected:
            raise ConfigError(
                f"tensor {key} in {path} is not the {tensor.dtype} {list(chunk.part.sizes)} that "
                f"{METADATA} says; the checkpoint is damaged"
            )
        return loaded


class _Record:
    """Stands in for any class that a table of contents names, and holds its arguments."""

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        return self.state[name]


class _TableUnpickler(pickle.Unpickler):
    """Unpickles a table of contents into inert records; nothing it names is looked up.

    But for torch's number formats and ``torch.Size``, which cannot be changed, every name becomes a
    class made for this one load. So there is nothing to call, and nothing to set an attribute on
    that anybody else sees.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._made: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            attribute = getattr(torch, name, None)
            if isinstance(attribute, torch.dtype) or attribute is torch.Size:
                return attribute
        if not module.startswith(("torch.", "pathlib")):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return self._made.setdefault(f"{module}.{name}", type(name, (_Record,), {}))


def _read_table(path: Path) -> dict[str, StoredTensor]:
    with reading(path):
        content = path.read_bytes()
    try:
        table = _TableUnpickler(io.BytesIO(content)).load()
        places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
        for index, place in table["storage_data"].items():
            if index.state.get("offset") is not None:
                location = (str(place["relative_path"]), int(place["offset"]), int(place["length"]))
                places[index["fqn"], tuple(index["offset"])] = location
        return {
            str(key): _stored(key, entry, places)
            for key, entry in table["state_dict_metadata"].items()
            if type(entry).__name__ == "TensorStorageMetadata"
        }
    except ConfigError:
        raise
    except (*DAMAGE, MemoryError) as error:  # a damaged length asks for any amount of memory
        raise ConfigError(
            f"{path} is not the table of contents of a torch_dist checkpoint: {error!r}"
        ) from None


def _stored(key: str, entry: _Record, places: dict) -> StoredTensor:
    shape = tuple(map(int, entry["size"]))
    dtype = entry["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"tensor {key} is of no number format of torch")
    chunks = []
    for chunk in entry["chunks"]:
        starts, sizes = tuple(map(int, chunk["offsets"])), tuple(map(int, chunk["sizes"]))
        inside = len(starts) == len(sizes) == len(shape) and all(
            0 <= start <= start + size <= extent
            for start, size, extent in zip(starts, sizes, shape, strict=True)
        )
        file, start, length = places[key, starts]
        if not inside or start < 0 or length < 0:
            at = (starts, sizes)
            raise ConfigError(f"tensor {key}: a chunk at {at} lies outside of {list(shape)}")
        chunks.append(StoredChunk(Slice(starts, sizes), file, start, length))
    return StoredTensor(shape, dtype, chunks)


def write_chunks(path: Path, chunks: Iterable[tuple[Chunk, Any]]) -> list[tuple[Chunk, int, int]]:
    """Write chunks into one file, in the order they come.

    Returns:
        Where each chunk starts and how long it is, for ``write_table``.
    """
    places = []
    with _without_crc32(), path.open("wb") as file:
        for chunk, value in chunks:
            start = file.tell()
            if isinstance(value, Tensor):
                value = value.detach().reshape(chunk.part.sizes)
                if value.untyped_storage().nbytes() != value.nbytes:
                    value = value.clone()  # torch.save would write the whole storage of a view
            try:
                torch.save(value, file)
            except RuntimeError as error:
                # A full disk: torch reports that its archive cannot be closed after that.
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
            places.append((chunk, start, file.tell() - start))
    return places


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Turn torch's checksums off: files have their own, and theirs take longer than writing."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def write_table(folder: Path, files: Mapping[str, list[tuple[Chunk, int, int]]]) -> None:
    """Complete a checkpoint: write the table of contents, the common facts and the format.

    Args:
        files: the result of ``write_chunks`` for each file of the folder.
    """
    # A second to import, which reading need not pay.
    from torch.distributed.checkpoint import filesystem, metadata

    tensors: dict[str, Any] = {}
    places: dict[metadata.MetadataIndex, Any] = {}
    for file in sorted(files):
        for chunk, start, length in files[file]:
            place = filesystem._StorageInfo(file, start, length)
            if chunk.shape is None:
                tensors[chunk.key] = metadata.BytesStorageMetadata()
                places[metadata.MetadataIndex(chunk.key)] = place
                continue
            offsets, sizes = torch.Size(chunk.part.starts), torch.Size(chunk.part.sizes)
            entry = tensors.setdefault(
                chunk.key,
                metadata.TensorStorageMetadata(
                    properties=metadata.TensorProperties(dtype=chunk.dtype),
                    size=torch.Size(chunk.shape),
                    chunks=[],
                ),
            )
            entry.chunks.append(metadata.ChunkStorageMetadata(offsets, sizes))
            places[metadata.MetadataIndex(chunk.key, offsets)] = place
    table = metadata.Metadata(tensors, storage_data=places)
    with (folder / METADATA).open("wb") as written:
        pickle.dump(table, written)
    torch.save({"content_metadata": CONTENT, "checkpoint_version": 3.0}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
