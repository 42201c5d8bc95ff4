"""A conversion: a folder of large files that appears whole or not at all.

Files are written one after the other in a folder beside OUT. Each is synced and summed up while the
next is written. When all are whole the folder is renamed to OUT, with a ``qurl_manifest.json`` that
records size and sum of every file.
"""

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from qurl_megatron.checkpoints.integrity import (
    MANIFEST,
    FileSum,
    refuse_damaged,
    sum_of,
    to_disk,
    write_record,
)
from qurl_megatron.kit.disk import new_folder
from qurl_megatron.kit.filesystem import free, refusing

_SEALERS = 2  # threads that sum up and sync files while the next one is written


@dataclass(frozen=True)
class OutputFile:
    name: str
    bytes: int
    write: Callable[[Path], None]


@dataclass(frozen=True)
class ConversionJob:
    out: Path
    files: list[OutputFile]
    finish: Callable[[Path], None]
    """Writes the small files into the folder, after the large ones."""
    source: Path | None = None
    """The folder to read; if it has checksums, they are compared first."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def run(
    job: ConversionJob, *, watch: Callable[[Sequence[OutputFile]], Iterable[OutputFile]] = iter
) -> None:
    """Write the folder.

    Args:
        watch: iterates over the files, and may show how far it has come.

    Raises:
        ConfigError: something is in the way, the disk is full or not writable, or a file cannot be
            made. Nothing is left of the folder.
    """
    if job.source is not None:
        refuse_damaged(job.source)
    with refusing(job.out, key="--out", size=job.bytes):
        with new_folder(job.out) as aside, ThreadPoolExecutor(_SEALERS) as pool:
            if job.bytes > free(aside):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            futures: dict[str, Future[FileSum]] = {}
            for file in watch(job.files):
                file.write(aside / file.name)
                futures[file.name] = pool.submit(_seal, aside / file.name)
            sums = {name: future.result() for name, future in futures.items()}
            job.finish(aside)
            write_record(aside, sums, MANIFEST)
        to_disk(job.out.parent)


def _seal(path: Path) -> FileSum:
    to_disk(path)
    return sum_of(path)
