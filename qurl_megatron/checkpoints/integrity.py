"""Sizes and XXH3-128 sums of the files of a checkpoint, to find damage.

    step_000040/files.json   {"format": "qurl-files-1", "files": {"common.pt": [1234, "5c.."]}}
    OUT/qurl_manifest.json   the same, of a conversion; it is compared on request alone, so that
                             users may edit an exported folder

Disks and copies lose or change bytes silently. XXH3 detects that at the speed of memory; it does
not detect malice.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.errors import ConfigError, Unreadable, reading

RECORD = "files.json"
MANIFEST = "qurl_manifest.json"
FORMAT = "qurl-files-1"
FIX = "copy the checkpoint again, or name an older one"
"""Advice about a damaged checkpoint that nothing is resumed from."""


class FileSum(NamedTuple):
    """Size and sum of a file when it was written."""

    bytes: int
    xxh3: str  # of 128 bits, hexadecimal


def sum_of(path: Path) -> FileSum:
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        return FileSum(file.tell(), digest.hexdigest())


def write_record(folder: Path, known: Mapping[str, FileSum], record_name: str = RECORD) -> None:
    """Record every file below a folder that is whole now.

    Args:
        known: sums by name of files that were summed while they were written, and synced; all
            others are read back and synced here.
    """
    sums = dict(known)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        record_files = (record_name, f".{record_name}.new")
        if path.is_file() and name not in known and name not in record_files:
            to_disk(path)
            sums[name] = sum_of(path)
    text = json.dumps({"format": FORMAT, "files": dict(sorted(sums.items()))}, indent=1)
    write_whole(folder / record_name, text + "\n", sync=True)
    to_disk(folder)


def read_record(folder: Path, record_name: str = RECORD) -> dict[str, FileSum] | None:
    """Return the sums of a folder's files by name; None if it has no record.

    Raises:
        Unreadable: the system cannot read the record, or another version wrote it.
        ConfigError: the record is damaged.
    """
    path = folder / record_name
    try:
        with reading(path):
            content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        table = json.loads(content)
        if table["format"] == FORMAT:
            sums = msgspec.convert(table["files"], dict[str, FileSum])
            for name in sums:
                place = Path(name)
                if place.is_absolute() or ".." in place.parts or not place.parts or "\0" in name:
                    raise ValueError(f"{name!r:.80} does not lie in the folder")
            return sums
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({error!r:.200})") from None
    raise Unreadable(
        f"{path} is of the format {table['format']!r:.40}, which this version does not know; read "
        "it with the version that wrote it"
    )


def wrong_size(folder: Path, record: Mapping[str, FileSum]) -> str | None:
    """Describe the first file that is missing, cut off or too long; reads none.

    Raises:
        Unreadable: the system cannot tell.
    """
    for name, entry in record.items():
        path = folder / name
        try:
            with reading(path):
                size = path.stat().st_size
        except FileNotFoundError:
            return f"{path} is missing"
        if size != entry.bytes:
            return f"{path} has {size} bytes where {entry.bytes} were written"
    return None


def damaged(folder: Path, record: Mapping[str, FileSum], names: Iterable[str]) -> str | None:
    """Describe the first of some files whose content has changed; reads them all.

    Raises:
        Unreadable: the system cannot read one.
    """
    for name in names:
        path = folder / name
        try:
            with reading(path):
                actual = sum_of(path)
        except FileNotFoundError:
            return f"{path} is missing"
        if actual != record[name]:
            return f"{path} has changed since it was written: its checksum differs"
    return None


def refuse_damaged(folder: Path) -> None:
    """Read every file of a folder with a record and compare the sums.

    Raises:
        ConfigError: a file has changed or cannot be read.
    """
    record = read_record(folder) or {}
    if wrong := wrong_size(folder, record) or damaged(folder, record, record):
        raise ConfigError(f"{wrong}; {FIX}")


def all_damage(folder: Path) -> list[str]:
    """Describe every file that is not as a run or a conversion wrote it.

    Raises:
        ConfigError: the folder has no sums, or a file cannot be read.
    """
    record = read_record(folder, MANIFEST) or read_record(folder)
    if record is None:
        raise ConfigError(
            f"{folder} has neither {MANIFEST} nor {RECORD}: nobody knows what was written"
        )
    faults = []
    for name, entry in record.items():
        if fault := wrong_size(folder, {name: entry}) or damaged(folder, record, [name]):
            faults.append(fault)
    return faults


def to_disk(path: Path) -> None:
    """Force a file to disk, or a folder with the new names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems keep their names safe by themselves, and refuse this.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
