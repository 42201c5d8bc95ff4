"""A folder of large files, written so that it is there whole or not at all, and can be continued.

    .OUT.partial/            what a killed job leaves; no reader takes it for a checkpoint
      job.json               what was asked for: only the same job continues here
      records/FILE.json      written when FILE is whole, synced and in place
      data/FILE
    OUT/                     the folder ``data``, renamed in the end
      qurl_manifest.json     what was asked for; size and SHA-256 of every file

Files are independent of each other, so several ranks share them; the first one does the rest.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from qurl_megatron.checkpoints.integrity import FIX, damaged, read_record, wrong_size
from qurl_megatron.checkpoints.workers import ALONE, Workers
from qurl_megatron.kit.disk import lock, read_json, write_whole
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.text import byte_size

MANIFEST = "qurl_manifest.json"
FORMAT = "qurl-checkpoint-1"

# Files that wait to be hashed and synced, each by a thread, while the next one is written.
_SEALERS = 2

# What a person can fix: no room, no permission, a file or folder in the way.
_FIXABLE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.EBUSY,
    errno.EXDEV,
    errno.ENAMETOOLONG,
)


@dataclass(frozen=True)
class OutputFile:
    """One large file of the folder."""

    name: str
    bytes: int
    write: Callable[[Path], Any]
    """Writes the file; what it returns, as JSON, is kept for ``ConversionJob.finish``."""


@dataclass(frozen=True)
class ConversionJob:
    """A folder to be written."""

    out: Path
    request: dict[str, Any]
    """Everything that decides what is written, as JSON."""
    files: list[OutputFile]
    finish: Callable[[Path, dict[str, Any]], None]
    """Given the folder and what each file's ``write`` returned: writes the small files."""
    source: Path | None = None
    """What is read. A run's checkpoint is held against its checksums first, each worker a share."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True)
class _Aside:
    """The folder beside OUT that the job works in."""

    root: Path

    @property
    def data(self) -> Path:
        return self.root / "data"

    def record(self, file: OutputFile) -> dict[str, Any] | None:
        """What is known of a whole file; None where it is still to be written."""
        path = self.root / "records" / f"{file.name}.json"
        if not path.is_file():
            return None
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError:  # a crash of the machine: the file is simply written again
            return None
        return record if _size(self.data / file.name) == record["bytes"] else None


def run(
    job: ConversionJob, *, workers: Workers = ALONE, restart: bool = False, checksums: bool = True
) -> bool:
    """Write the folder, or what is left of it; all workers call it together.

    Args:
        restart: throw away what a killed job of another kind left.
        checksums: put SHA-256 sums into the manifest; without, sizes alone.

    Returns:
        False where the folder is there already, written for the same request.

    Raises:
        ConfigError: something else is in the way, the disk is full or not writable, or a file
            cannot be made. What is finished stays, and the next run continues from there.
    """
    request = json.loads(json.dumps({**job.request, "checksums": checksums}))
    aside = _Aside(partial_folder(job.out))
    with workers.together(), _disk_errors(job.out):
        done = is_done(job, checksums=checksums)
    if done:
        if workers.leads:
            shutil.rmtree(aside.root, ignore_errors=True)  # of a job killed after its last step
        return False
    with workers.together():
        _check_source(job.source, workers)
    lock: TextIO | None = None
    with workers.together(), _disk_errors(aside.root):
        if workers.leads:
            lock = _claim(aside)
            _reopen(aside, request, restart)
            _check_space(job, aside)
            _hold(lock, fcntl.LOCK_SH, aside)
    with workers.together(), _disk_errors(aside.root):
        if not workers.leads:
            lock = (aside.root / ".lock").open("w")
            _hold(lock, fcntl.LOCK_SH, aside)
    assert lock is not None
    with lock:
        with workers.together(), _disk_errors(aside.root):
            _write_share(job, aside, workers, checksums)
        with workers.together(), _disk_errors(aside.root):
            if workers.leads:
                _finish(job, aside, request, checksums)
    return True


def is_done(job: ConversionJob, *, checksums: bool = True) -> bool:
    """True where the folder is there, written for the same request, and nothing of it is lost.

    Raises:
        ConfigError: something else is there, or what is there is damaged.
    """
    out = job.out
    if out.is_symlink() or out == Path.cwd():
        raise ConfigError(f"{out} is a link or the current folder; name another --out")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    manifest = read_manifest(out) if out.is_dir() else None
    request = json.loads(json.dumps({**job.request, "checksums": checksums}))
    if manifest is None or manifest["request"] != request:
        raise ConfigError(f"{out} exists already; remove it or name another --out")
    wrong = verify(out, hashes=False)
    if wrong:
        raise ConfigError(f"{out} is damaged ({wrong[0]}); remove it and run again")
    return True


def bytes_on_disk(job: ConversionJob) -> int:
    """How much of a job's large files is written, by all workers; for showing progress."""
    data = _Aside(partial_folder(job.out)).data
    return sum(_size(data / name) for f in job.files for name in (f.name, f"{f.name}.tmp"))


def partial_folder(out: Path) -> Path:
    """Where a job works before its folder is whole."""
    return out.parent / f".{out.name}.partial"


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder a job wrote; None where it has none.

    Raises:
        ConfigError: it is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    manifest = read_json(path)
    files = manifest.get("files")
    complete = (
        manifest.get("format") == FORMAT and "request" in manifest and isinstance(files, dict)
    )
    if not complete or not all(_is_entry(*entry) for entry in manifest["files"].items()):
        raise ConfigError(f"{path} is damaged; convert the checkpoint again")
    return manifest


def _is_entry(name: str, entry: Any) -> bool:
    """True for what ``_entry`` made of a file of the folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        return False
    has_size = isinstance(entry, dict) and type(entry.get("bytes")) is int
    return has_size and isinstance(entry.get("sha256", 0), (str, type(None)))


def verify(folder: Path, *, hashes: bool = True) -> list[str]:
    """What is wrong with the files of a folder, by its manifest: one sentence per file.

    Of a run's checkpoint, by its own record: the first file that is not what was written.

    Args:
        hashes: read and hash every file; without, their sizes are compared.

    Raises:
        ConfigError: the folder has neither.
    """
    manifest = read_manifest(folder)
    if manifest is None and (record := read_record(folder)):
        fault = wrong_size(folder, record) or (hashes and damaged(folder, record, record))
        return [fault] if fault else []
    if manifest is None:
        raise ConfigError(f"{folder} has no {MANIFEST}: it was not written by these tools")
    wrong = []
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif _size(path) != entry["bytes"]:
            wrong.append(f"{name} has {_size(path)} bytes, written were {entry['bytes']}")
        elif hashes and entry["sha256"] and _sha256(path) != entry["sha256"]:
            wrong.append(f"{name} has changed: its SHA-256 is not the one of the manifest")
    return wrong


def _check_source(source: Path | None, workers: Workers) -> None:
    record = read_record(source) if source else None
    if source is None or record is None:
        return
    share = workers.share(list(record), size=lambda name: record[name].bytes)
    if wrong := damaged(source, record, share):
        raise ConfigError(f"{wrong}; {FIX}")


def _claim(aside: _Aside) -> TextIO:
    """Make or reopen the aside folder, and be the only job in it."""
    try:
        aside.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write {aside.root}: {error.strerror}; name another --out"
        ) from error
    lock = (aside.root / ".lock").open("w")
    _hold(lock, fcntl.LOCK_EX, aside)
    return lock


def _hold(held: TextIO, kind: int, aside: _Aside) -> None:
    """Lock out other jobs until the file is closed; the workers of one job share the lock."""
    try:
        if not lock(held, kind):
            raise ConfigError(
                f"another job is writing {aside.root}; wait for it or name another --out"
            )
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        print(
            f"{aside.root} is on a file system without locks: see to it that no other job "
            "writes there",
            file=sys.stderr,
        )


def _reopen(aside: _Aside, request: dict[str, Any], restart: bool) -> None:
    """Keep what the same job left; throw away what is asked to be, or is of no use."""
    request_file = aside.root / "job.json"
    before = None if restart or not request_file.is_file() else read_json(request_file)
    if before is not None and before != request:
        changed = sorted(
            key for key in before.keys() | request.keys() if before.get(key) != request.get(key)
        )
        raise ConfigError(
            f"{aside.root} holds an unfinished job with another {' and '.join(changed)}; "
            "give --restart to throw it away, or name another --out"
        )
    if before is None:
        for path in aside.root.iterdir():
            if path.name != ".lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    for folder in (aside.data, aside.root / "records"):
        folder.mkdir(exist_ok=True)
    _write_synced(request_file, json.dumps(request))


def _check_space(job: ConversionJob, aside: _Aside) -> None:
    needed = sum(file.bytes for file in job.files if aside.record(file) is None)
    free = shutil.disk_usage(aside.root).free
    if needed > free:
        raise ConfigError(
            f"{aside.root.parent} has {byte_size(free)} free, {job.out.name} needs "
            f"{byte_size(needed)} more; free some space or name another --out"
        )


def _write_share(job: ConversionJob, aside: _Aside, workers: Workers, checksums: bool) -> None:
    """Write this worker's files; whole ones are hashed and synced while the next is written."""
    with ThreadPoolExecutor(_SEALERS) as pool:
        sealing: list[Future] = []
        try:
            for file in workers.share(job.files, size=lambda file: file.bytes):
                if aside.record(file) is not None:
                    continue
                while len(sealing) >= _SEALERS:
                    sealing.pop(0).result()
                unsealed = aside.data / f"{file.name}.tmp"
                kept = file.write(unsealed)
                sealing.append(pool.submit(partial(_seal, file, unsealed, aside, kept, checksums)))
            for future in sealing:
                future.result()
        except BaseException:  # an interrupt, too: seal nothing more, then let it pass
            pool.shutdown(cancel_futures=True)
            raise


def _seal(file: OutputFile, unsealed: Path, aside: _Aside, kept: Any, checksums: bool) -> None:
    """Hash what is on disk, sync it, move it into place, and only then say that it is there."""
    record = {**_entry(unsealed, checksums), "kept": kept}
    _sync(unsealed)
    unsealed.rename(aside.data / file.name)
    _sync(aside.data)
    _write_synced(aside.root / "records" / f"{file.name}.json", json.dumps(record))


def _finish(job: ConversionJob, aside: _Aside, request: dict[str, Any], checksums: bool) -> None:
    # Read back even what this process wrote: a continued job must end in the same bytes.
    records = {}
    for file in job.files:
        if (record := aside.record(file)) is None:
            raise ConfigError(f"{file.name} in {aside.data} is gone or cut off; run again")
        records[file.name] = record
    for path in aside.data.iterdir():  # small files of a job that was killed in this function
        if path.name not in records:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    job.finish(aside.data, {name: record["kept"] for name, record in records.items()})
    entries = {n: {"bytes": r["bytes"], "sha256": r["sha256"]} for n, r in records.items()}
    for path in sorted(aside.data.rglob("*")):
        name = str(path.relative_to(aside.data))
        if path.is_file() and name not in entries:
            _sync(path)
            entries[name] = _entry(path, checksums)
    manifest = {"format": FORMAT, "request": request, "files": dict(sorted(entries.items()))}
    _write_synced(aside.data / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    os.rename(aside.data, job.out)  # an empty folder at ``out`` is replaced
    _sync(job.out.parent)
    shutil.rmtree(aside.root)


def _entry(path: Path, checksums: bool) -> dict[str, Any]:
    return {"bytes": _size(path), "sha256": _sha256(path) if checksums else None}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # not begun, or renamed a moment ago
        return 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_synced(path: Path, text: str) -> None:
    write_whole(path, text, sync=True)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Say in one sentence what the operating system refused, where a person can fix it."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FIXABLE:
            raise
        raise ConfigError(
            f"cannot write {error.filename or path}: {error.strerror}; fix that or name another "
            "--out, and run again to continue"
        ) from error
