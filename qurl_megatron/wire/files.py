"""Buckets as safetensors files in a folder that trainer and engines share.

    root/v000012/pp0-tp0-b00003.safetensors   one per training rank and bucket
    root/v000012/manifest.json                written last; see wire/manifest.py
    root/receipts/                            left by engines

A file appears whole, under its name, or not at all. It is not forced to disk: checksums show the
damage after a power cut.
"""

import functools
import json
import mmap
import os
import shutil
import stat
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from qurl_megatron.kit import filesystem
from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.undertaker import bury, remove
from qurl_megatron.tensors.formats_on_disk import NAMES
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.wire.manifest import MANIFEST, Manifest
from qurl_megatron.wire.message import ALIGNMENT, Blob, Piece, Receipt, checksum, piece_at, raw
from qurl_megatron.wire.receipts import collect, leave
from qurl_megatron.wire.transport import Rank, Sender, Site

RECEIPTS = "receipts"
refusing = functools.partial(filesystem.refusing, key="sync.dir")


class FilesSender(Sender):
    kind = "files"
    lasting = True

    def __init__(self, root: Path, rank: str, *, leads: bool, receipt_wait_s: float = 90.0) -> None:
        """
        Args:
            root: versions go to ``root/v000012``; engines see it under the same path.
            rank: begins the names of this rank's files; no other training rank's may be the same.
            leads: this rank deletes old versions, and at the end the root.
            receipt_wait_s: how long a network filesystem may take to show an engine's receipt.

        Raises:
            ConfigError: the folder cannot be made.
        """
        self.root = root.absolute()
        self.rank, self.leads, self.receipt_wait_s = rank, leads, receipt_wait_s
        self.folder = self.root
        with refusing(self.root, size=0):
            (self.root / RECEIPTS).mkdir(parents=True, exist_ok=True)
        if leads:
            bury(self.root)

    @classmethod
    def open(cls, site: Site) -> "FilesSender":
        root = None
        if site.leads:
            root = versions_root(site)
            shutil.rmtree(root, ignore_errors=True)  # files of a killed run
            private_folder(root)
        root = site.share(root)
        return cls(root, site.name, leads=site.leads, receipt_wait_s=site.receipt_wait_s)

    def describe(self, engine: str) -> dict[str, Any]:
        return {"kind": self.kind, "receipts": str(self.root / RECEIPTS)}

    def begin(self, version: int) -> None:
        self.folder = self.root / f"v{version:06d}"
        with refusing(self.folder, size=0):
            self.folder.mkdir(exist_ok=True)
            (self.folder / MANIFEST).unlink(missing_ok=True)
            for old in self.folder.glob(f"{self.rank}-b*"):
                old.unlink()

    def put(self, index: int, parts: Sequence[Shard], *, to: Rank | None = None) -> Blob:
        path = self.folder / f"{self.rank}-b{index:05d}.safetensors"
        header, places, size = _header(parts)
        aside = path.with_suffix(".tmp")
        with refusing(path, size=len(header) + size, half_written=aside):
            with aside.open("wb", buffering=0) as file:
                _write(file.fileno(), memoryview(header))
                pieces = [_written(file.fileno(), *place) for place in places]
            aside.rename(path)
        return Blob({"path": str(path), "offset": len(header)}, size, tuple(pieces))

    def seal(self, manifest: Manifest) -> None:
        path, content = self.folder / MANIFEST, msgspec.json.encode(manifest)
        with refusing(path, size=len(content)):
            write_whole(path, content, sync=True)

    def receipts(self, session: str, ranks: int) -> list[Receipt]:
        return collect(self.root / RECEIPTS, session, ranks, self.receipt_wait_s)

    def finish(self, *, keep: int) -> None:
        if self.leads:
            for old in sorted(self.root.glob("v*"))[:-keep]:
                # A network filesystem keeps files that an engine still has open for a while.
                shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        if self.leads:
            remove(self.root)


def private_folder(path: Path) -> None:
    """Make a folder that nobody else can enter.

    Raises:
        ConfigError: it cannot be made, or is another user's.
    """
    with refusing(path, size=0):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        must_be_ours(path, os.stat(path, follow_symlinks=False), stat.S_ISDIR)


def must_be_ours(path: Path, found: os.stat_result, is_kind) -> None:
    if not is_kind(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(f"{path} is not what this user's trainer makes there; remove it")


def versions_root(site: Site) -> Path:
    """Return the recipe's folder, else one in memory if versions fit, else the run's."""
    name = f"qurl-{site.token}-versions"
    if site.shared:
        return Path(site.shared) / name
    memory = Path("/dev/shm")
    if site.one_machine and memory.is_dir() and os.access(memory, os.W_OK):
        shutil.rmtree(memory / name, ignore_errors=True)
        if shutil.disk_usage(memory).free > site.bytes:
            return memory / name
    return site.run_dir / "versions"


class FilesReceiver:
    def __init__(self, transport: dict[str, Any], rank: int) -> None:
        self._transport = transport
        self._receipts = Path(transport["receipts"])

    def follow(self, transport: dict[str, Any]) -> bool:
        return transport == self._transport

    def fetch(self, blob: Blob) -> Tensor:
        path, offset = Path(blob.where["path"]), blob.where["offset"]
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != offset + blob.bytes:
                    raise ConfigError(
                        f"{path} has {size} bytes instead of {offset + blob.bytes}: it is cut off, "
                        "or another process writes there"
                    )
                return mapped(file.fileno(), size)[offset:]
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror}); trainer and engines must share the "
                "folder under one path"
            ) from None

    def report(self, receipt: Receipt) -> None:
        leave(self._receipts, receipt)

    def close(self) -> None:
        pass


def mapped(descriptor: int, size: int, *, writable: bool = False) -> Tensor:
    """A file's first ``size`` bytes, uint8, without a copy."""
    memory = mmap.mmap(
        descriptor,
        size,
        flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
        prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
    )
    with warnings.catch_warnings():  # torch has no read-only tensors; nobody writes to this one
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


def _header(parts: Sequence[Shard]) -> tuple[bytes, list[tuple[Shard, int]], int]:
    """Return a safetensors header, where each part lies after it, and the bytes of all parts.

    Wide formats come first: without gaps, which the format forbids, every tensor then begins at a
    multiple of its element's size.
    """
    entries: dict[str, dict] = {}
    places, end = [], 0
    for part in sorted(parts, key=lambda part: -part.value.itemsize):
        assert part.name not in entries, f"{part.name} is twice in one bucket"
        start, end = end, end + part.value.nbytes
        entries[part.name] = {
            "dtype": NAMES[part.value.dtype],
            "shape": list(part.value.shape),
            "data_offsets": [start, end],
        }
        places.append((part, start))
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, places, end


def _written(descriptor: int, part: Shard, offset: int) -> Piece:
    """Append a tensor; return it as a piece."""
    data = raw(part.value.cpu())
    _write(descriptor, data.numpy().data)
    return piece_at(part, offset, checksum(data))


def _write(descriptor: int, data: memoryview) -> None:
    while data:  # the system takes at most 2 GiB at once
        data = data[os.write(descriptor, data) :]
