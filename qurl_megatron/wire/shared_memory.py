"""Buckets in memory that the trainer and the engines of one machine map: nothing is copied twice.

Each training rank has two slots and fills them in turn. On a CPU a slot is a file in a private
folder of /dev/shm; on a GPU it is device memory, shared by a CUDA IPC handle. A slot grows to the
largest bucket it has held and then stays.
"""

import base64
import functools
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.kit import filesystem
from qurl_megatron.kit.children import expandable_segments
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.wire import SLOTS
from qurl_megatron.wire.files import (
    FolderReceiver,
    FolderSender,
    mapped,
    must_be_ours,
    private_folder,
)
from qurl_megatron.wire.message import Blob, fill, lay_out
from qurl_megatron.wire.transport import Rank, Site, disagreement, own_facts

refusing = functools.partial(filesystem.refusing, key="sync.transport=files and sync.dir")


def memory_folder(token: str, root: Path = Path("/dev/shm")) -> Path:
    return root / f"qurl-{token}"


class MemorySender(FolderSender):
    kind = "memory"
    one_machine = True

    def __init__(
        self,
        token: str,
        rank: int,
        *,
        leads: bool,
        device: torch.device | str = "cpu",
        root: Path = Path("/dev/shm"),
    ) -> None:
        """
        Args:
            token: names the folder; the same on all training ranks of a run.
            rank: of all training ranks.

        Raises:
            ConfigError: the folder cannot be made, or is another user's; torch's allocator makes
                memory that cannot be shared.
        """
        folder = memory_folder(token, root)
        private_folder(folder)
        super().__init__(folder, leads=leads)
        self._facts = own_facts()
        device = torch.device(device)
        if device.type == "cuda" and (setting := expandable_segments(os.environ)):
            raise ConfigError(
                f"sync.transport={self.kind} shares GPU memory by CUDA IPC, which engines cannot "
                f"open with {setting}; leave expandable_segments out, or set sync.transport=files"
            )
        self._slots = [_Slot(self.folder / f"rank{rank}-{n}", device) for n in range(SLOTS)]

    @classmethod
    def open(cls, site: Site) -> "MemorySender":
        if site.leads:
            shutil.rmtree(memory_folder(site.token), ignore_errors=True)  # files of a killed run
        site.share(None)  # a barrier: no rank makes files there before
        return cls(site.token, site.rank, leads=site.leads, device=site.device)

    def describe(self, engine: str, ranks: int) -> dict[str, Any]:
        return {**super().describe(engine, ranks), "facts": self._facts}

    def room(self, index: int) -> Tensor | None:
        return self._slots[index % SLOTS].memory

    def put(self, index: int, parts: Sequence[Shard], *, to: Rank | None = None) -> Blob:
        planned, size = lay_out(parts)
        slot = self._slots[index % SLOTS]
        pieces = fill(slot.of(size), planned, [part.value for part in parts])
        return Blob(slot.where, size, pieces)

    def close(self) -> None:
        for slot in self._slots:
            slot.close()
        super().close()


class MemoryReceiver(FolderReceiver):
    def __init__(self, transport: dict[str, Any], rank: int) -> None:
        super().__init__(transport, rank)
        if reason := disagreement("memory", transport["facts"], own_facts()):
            raise ConfigError(reason)
        self._open: dict[str, tuple[dict[str, Any], Tensor]] = {}

    def fetch(self, blob: Blob) -> Tensor:
        key = blob.where["slot"]
        opened_at, memory = self._open.get(key, (None, None))
        if memory is None or opened_at != blob.where:  # it grew, or a trainer was restarted
            self._open.pop(key, None)
            if "cuda" in blob.where:
                memory = _open_cuda(blob.where, self._transport["facts"])
            else:
                memory = _open_file(blob.where)
            self._open[key] = (blob.where, memory)
        if blob.bytes > len(memory):
            raise ConfigError(f"{key} holds {len(memory)} bytes, the blob says {blob.bytes}")
        return memory[: blob.bytes]

    def close(self) -> None:
        self._open.clear()


class _Slot:
    """Memory for one bucket, which grows to the largest it has held."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path, self._device = path, device
        self.memory: Tensor | None = None
        self.where: dict[str, Any] = {}  # ``Blob.where``

    def of(self, size: int) -> Tensor:
        """Return memory of at least ``size`` bytes.

        Raises:
            ConfigError: no room.
        """
        if self.memory is None or len(self.memory) < size:
            self.close()
            make = self._on_gpu if self._device.type == "cuda" else self._in_file
            self.memory = make(max(size, 1))
        return self.memory

    def close(self) -> None:
        self.memory = None
        self._path.unlink(missing_ok=True)

    def _in_file(self, size: int) -> Tensor:
        # A process that still maps the old file keeps it; the inode tells it that it is old.
        with refusing(self._path, size=size, half_written=self._path):
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                # Reserved, not only sized: a write to memory that is not there ends the process.
                os.posix_fallocate(file, 0, size)
                inode = os.fstat(file).st_ino
                self.where = {"slot": str(self._path), "inode": inode, "size": size}
                return mapped(file, size, writable=True)
            finally:
                os.close(file)

    def _on_gpu(self, size: int) -> Tensor:
        """Share it as torch.multiprocessing shares a CUDA tensor, with the arguments as JSON."""
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        index, *shared = memory.untyped_storage()._share_cuda_()
        self.where = {
            "slot": str(self._path),
            "cuda": str(torch.cuda.get_device_properties(index).uuid),
            "shared": [base64.b64encode(x).decode() if isinstance(x, bytes) else x for x in shared],
            "size": size,
        }
        return memory


def _open_file(address: dict[str, Any]) -> Tensor:
    path = address["slot"]
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be opened ({error.strerror}): the trainer is gone, or on another "
            "machine; set sync.transport to files or group"
        ) from None
    try:
        status = os.fstat(file)
        must_be_ours(Path(path), status, stat.S_ISREG)
        if status.st_size < address["size"] or status.st_ino != address["inode"]:
            raise ConfigError(
                f"{path} has {status.st_size} bytes, inode {status.st_ino}, instead of "
                f"{address['size']}, inode {address['inode']}: another trainer writes there"
            )
        return mapped(file, address["size"])
    finally:
        os.close(file)


def _open_cuda(address: dict[str, Any], trainer: Mapping[str, str]) -> Tensor:
    uuids = [
        str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())
    ]
    if address["cuda"] not in uuids:
        raise ConfigError(
            f"GPU {address['cuda']}, which holds the trainer's weights, is not visible to this "
            "engine; show it in CUDA_VISIBLE_DEVICES, or set sync.transport to group"
        )
    index = uuids.index(address["cuda"])
    torch.cuda._lazy_init()
    shared = [base64.b64decode(x) if isinstance(x, str) else x for x in address["shared"]]
    try:
        storage = torch.UntypedStorage._new_shared_cuda(index, *shared)
    except (RuntimeError, TypeError) as error:
        # torch opens the handles of its own version and of most others.
        raise ConfigError(
            f"the trainer's GPU memory (torch {trainer['torch']}, CUDA {trainer['cuda']}) cannot "
            f"be opened in the engine (torch {torch.__version__}, CUDA {torch.version.cuda}): "
            f"{str(error).partition(chr(10))[0]}; install the same torch in both environments, or "
            "set sync.transport=files"
        ) from None
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
