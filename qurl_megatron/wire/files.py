"""Buckets as files in a folder that trainer and engines share.

    root/v000012-pp0-tp0-b00003   one per training rank and bucket, until all engines have loaded it
    root/receipts/                from the engines

A file appears whole or not at all. It is not forced to disk: after a power cut, checksums show the
damage.
"""

import contextlib
import functools
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
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.wire.message import Blob, Receipt, checksum, lay_out, raw
from qurl_megatron.wire.transport import Rank, Sender, Site, receipt_name

RECEIPTS = "receipts"
refusing = functools.partial(filesystem.refusing, key="sync.dir")


class FolderSender(Sender):
    """Engines leave their receipts in a folder, which they see under the same path."""

    def __init__(self, folder: Path, *, leads: bool) -> None:
        """
        Args:
            leads: this rank removes the folder at the end.

        Raises:
            ConfigError: the folder cannot be made.
        """
        self.folder, self.leads = folder.absolute(), leads
        with refusing(self.folder, size=0):
            (self.folder / RECEIPTS).mkdir(parents=True, exist_ok=True)
        if leads:
            bury(self.folder)

    def describe(self, engine: str, ranks: int) -> dict[str, Any]:
        return {"kind": self.kind, "receipts": str(self.folder / RECEIPTS)}

    def take_receipt(self, name: str) -> bytes | None:
        """Return a receipt's content and remove it; None: it is not there yet.

        The client of a network filesystem asks the server at the first look for a name, and may
        then remember for a minute that it was absent. Opening the folder again clears that.
        """
        path = self.folder / RECEIPTS / name
        with refusing(path):
            for refresh in (False, True):
                if refresh:
                    _refresh(path.parent)
                with contextlib.suppress(FileNotFoundError):
                    content = path.read_bytes()
                    path.unlink()
                    return content
            # An engine without room for its receipt cannot say so: find out by writing here.
            room = path.with_suffix(".room")
            write_whole(room, b"1")
            room.unlink()
        return None

    def close(self) -> None:
        if self.leads:
            remove(self.folder)


class FilesSender(FolderSender):
    kind = "files"
    lasting = True
    receipt_wait_s = 90.0  # network filesystems remember a folder for up to a minute

    def __init__(self, root: Path, rank: str, *, leads: bool) -> None:
        """
        Args:
            rank: names this rank's files; unique among the training ranks.

        Raises:
            ConfigError: the folder cannot be made.
        """
        super().__init__(root, leads=leads)
        self.rank = rank
        self._version = 0
        self._files: list[Path] = []

    @classmethod
    def open(cls, site: Site) -> "FilesSender":
        root = None
        if site.leads:
            root = site.run_dir / "versions"
            if site.shared:
                root = Path(site.shared) / f"qurl-{site.token}-versions"
            shutil.rmtree(root, ignore_errors=True)  # files of a killed run
            private_folder(root)
        root = site.share(root)
        return cls(root, site.name, leads=site.leads)

    def begin(self, version: int) -> None:
        self.finish()
        self._version = version

    def put(self, index: int, parts: Sequence[Shard], *, to: Rank | None = None) -> Blob:
        path = self.folder / f"v{self._version:06d}-{self.rank}-b{index:05d}"
        planned, size = lay_out(parts)
        scratch, pieces = path.with_suffix(".tmp"), []
        with refusing(path, size=size, half_written=scratch):
            with scratch.open("wb") as file:
                for piece, part in zip(planned, parts, strict=True):
                    data = raw(part.value.cpu())
                    file.seek(piece.offset)
                    file.write(data.numpy().data)
                    pieces.append(msgspec.structs.replace(piece, checksum=checksum(data)))
                file.truncate(size)
            scratch.rename(path)
        self._files.append(path)
        return Blob({"path": str(path)}, size, tuple(pieces))

    def finish(self) -> None:
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files.clear()


def private_folder(path: Path) -> None:
    """Make a folder that nobody else can enter.

    Raises:
        ConfigError: it cannot be made, or is another user's.
    """
    with refusing(path, size=0):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        must_be_ours(path, os.stat(path, follow_symlinks=False), stat.S_ISDIR)


def must_be_ours(path: Path, status: os.stat_result, is_kind) -> None:
    if not is_kind(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"{path} is not what this user's trainer makes there; remove it")


class FolderReceiver:
    """An engine rank's end of a ``FolderSender``."""

    def __init__(self, transport: dict[str, Any], rank: int) -> None:
        self._transport = transport
        self._receipts = Path(transport["receipts"])

    def follow(self, transport: dict[str, Any]) -> bool:
        return transport == self._transport

    def report(self, receipt: Receipt) -> None:
        path = self._receipts / receipt_name(receipt.session, receipt.rank)
        try:
            write_whole(path, msgspec.json.encode(receipt))
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written ({error.strerror}); trainer and engines must share that "
                "folder"
            ) from None

    def close(self) -> None:
        pass


class FilesReceiver(FolderReceiver):
    def fetch(self, blob: Blob) -> Tensor:
        path = Path(blob.where["path"])
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != blob.bytes:
                    raise ConfigError(
                        f"{path} has {size} bytes instead of {blob.bytes}: it is cut off, "
                        "or another process writes there"
                    )
                return mapped(file.fileno(), size)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror}); trainer and engines must share the "
                "folder under one path"
            ) from None


def mapped(descriptor: int, size: int, *, writable: bool = False) -> Tensor:
    """Return a file's first ``size`` bytes, uint8, without a copy."""
    memory = mmap.mmap(
        descriptor,
        size,
        flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
        prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
    )
    with warnings.catch_warnings():  # torch has no read-only tensors; nobody writes to this one
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


def _refresh(folder: Path) -> None:
    """Clear a network filesystem's cache of a folder's names."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some filesystems have nothing to do for a folder
            os.fsync(opened)
        os.fstat(opened)
    finally:
        os.close(opened)
