"""A folder of large files that appears whole or not at all, and can be continued.

.OUT.partial/            left by a killed job; no reader takes it for a checkpoint
  job.json               the request: only the same job continues here
  records/FILE.json      written when FILE is whole, synced and in place
  data/FILE
OUT/                     the folder ``data``, renamed at the end
  qurl_manifest.json     the request, and size and SHA-256 of every file
"""

import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from qurl_megatron.checkpoints.integrity import (
    damaged,
    read_record,
    refuse_damaged,
    to_disk,
    wrong_size,
)
from qurl_megatron.kit.disk import lock, read_json, write_whole
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import refusing
from qurl_megatron.observe.text import byte_size

MANIFEST = "qurl_manifest.json"
FORMAT = "qurl-checkpoint-1"

_SEALERS = 2  # threads that hash and sync files while the next one is written


@dataclass(frozen=True)
class OutputFile:
    """One large file of the folder."""

    name: str
    bytes: int
    write: Callable[[Path], Any]
    """Writes the file; its return value, as JSON, is kept for ``ConversionJob.finish``."""


@dataclass(frozen=True)
class ConversionJob:
    """A folder to be written."""

    out: Path
    request: dict[str, Any]
    """All inputs that the written bytes depend on, as JSON."""
    files: list[OutputFile]
    finish: Callable[[Path, dict[str, Any]], None]
    """Writes the small files, given the folder and the return value of each file's ``write``."""
    source: Path | None = None
    """The folder that is read; a run's checkpoint is held against its checksums first."""

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
        """Return the record of a whole file; None where the file is still to be written."""
        path = self.root / "records" / f"{file.name}.json"
        if not path.is_file():
            return None
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError:  # a crash of the machine: the file is simply written again
            return None
        return record if _size(self.data / file.name) == record["bytes"] else None


def run(
    job: ConversionJob,
    *,
    restart: bool = False,
    progress: Callable[[int], None] = lambda done_bytes: None,
) -> bool:
    """Write the folder, or the rest of it.

    Args:
        restart: throw away the files of a killed job with another request.
        progress: called after each file with the bytes written so far.

    Returns:
        False where the folder is there already, written for the same request.

    Raises:
        ConfigError: something else is in the way, the disk is full or not writable, or a file
            cannot be made. Finished files stay, and the next run continues from there.
    """
    aside = _Aside(partial_folder(job.out))
    with refusing(job.out, key="--out"):
        done = is_done(job)
    if done:
        shutil.rmtree(aside.root, ignore_errors=True)  # of a job killed after its last step
        return False
    if job.source is not None:
        refuse_damaged(job.source)
    with refusing(aside.root, key="--out"):
        aside.root.mkdir(parents=True, exist_ok=True)
        with (aside.root / ".lock").open("w") as lock_file:
            _refuse_second_job(lock_file, aside)
            _reopen(aside, job.request, restart)
            _refuse_too_little_space(job, aside)
            _write_files(job, aside, progress)
            _finish(job, aside)
    return True


def is_done(job: ConversionJob) -> bool:
    """True where the folder is there, written for the same request, and no file of it is lost.

    Raises:
        ConfigError: something else is there, or the folder is damaged.
    """
    out = job.out
    if out.is_symlink() or out == Path.cwd():
        raise ConfigError(f"{out} is a link or the current folder; name another --out")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    manifest = read_manifest(out) if out.is_dir() else None
    if manifest is None or manifest["request"] != _as_json(job.request):
        raise ConfigError(f"{out} exists already; remove it or name another --out")
    if faults := verify(out, hashes=False):
        raise ConfigError(f"{out} is damaged ({faults[0]}); remove it and run again")
    return True


def partial_folder(out: Path) -> Path:
    """The folder that a job works in before ``out`` is whole."""
    return out.parent / f".{out.name}.partial"


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a folder that a job wrote; None where it has none.

    Raises:
        ConfigError: it is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    manifest = read_json(path)
    files = manifest.get("files")
    complete = manifest.get("format") == FORMAT and "request" in manifest
    complete = complete and isinstance(files, dict)
    if not complete or not all(_is_entry(*entry) for entry in manifest["files"].items()):
        raise ConfigError(f"{path} is damaged; convert the checkpoint again")
    return manifest


def _is_entry(name: str, entry: Any) -> bool:
    """True for a file inside the folder with a size and perhaps a sum."""
    if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        return False
    has_size = isinstance(entry, dict) and type(entry.get("bytes")) is int
    return has_size and isinstance(entry.get("sha256", 0), (str, type(None)))


def verify(folder: Path, *, hashes: bool = True) -> list[str]:
    """Return one sentence per file that differs from the manifest of a folder.

    A run's checkpoint has a record instead, and the first wrong file is named.

    Args:
        hashes: read and hash every file; otherwise compare sizes alone.

    Raises:
        ConfigError: the folder has neither.
    """
    manifest = read_manifest(folder)
    if manifest is None and (record := read_record(folder)):
        fault = wrong_size(folder, record) or (hashes and damaged(folder, record, record))
        return [fault] if fault else []
    if manifest is None:
        raise ConfigError(f"{folder} has no {MANIFEST}: it was not written by these tools")
    faults = []
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif _size(path) != entry["bytes"]:
            faults.append(f"{name} has {_size(path)} bytes, written were {entry['bytes']}")
        elif hashes and entry["sha256"] and _sha256(path) != entry["sha256"]:
            faults.append(f"{name} has changed: its SHA-256 is not the one of the manifest")
    return faults


def _refuse_second_job(lock_file: TextIO, aside: _Aside) -> None:
    try:
        if not lock(lock_file):
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
    """Keep the files of the same job; refuse another job's, or delete them on ``restart``."""
    request = _as_json(request)
    request_file = aside.root / "job.json"
    before = None
    if request_file.is_file() and not restart:
        before = read_json(request_file)
    if before is None:
        for path in aside.root.iterdir():
            if path.name != ".lock":
                _remove(path)
    elif before != request:
        keys = sorted(before.keys() | request.keys())
        changed_keys = [key for key in keys if before.get(key) != request.get(key)]
        raise ConfigError(
            f"{aside.root} holds an unfinished job with another {' and '.join(changed_keys)}; "
            "give --restart to throw it away, or name another --out"
        )
    for folder in (aside.data, aside.root / "records"):
        folder.mkdir(exist_ok=True)
    _write_synced(request_file, json.dumps(request))


def _refuse_too_little_space(job: ConversionJob, aside: _Aside) -> None:
    needed = sum(file.bytes for file in job.files if aside.record(file) is None)
    free = shutil.disk_usage(aside.root).free
    if needed > free:
        raise ConfigError(
            f"{aside.root.parent} has {byte_size(free)} free, {job.out.name} needs "
            f"{byte_size(needed)} more; free some space or name another --out"
        )


def _write_files(job: ConversionJob, aside: _Aside, progress: Callable[[int], None]) -> None:
    """Write the files; each is hashed and synced while the next is written."""
    done_bytes = 0
    with ThreadPoolExecutor(_SEALERS) as pool:
        sealing: list[Future] = []
        try:
            for file in job.files:
                if aside.record(file) is None:
                    while len(sealing) >= _SEALERS:
                        sealing.pop(0).result()
                    unsealed = aside.data / f"{file.name}.tmp"
                    kept = file.write(unsealed)
                    sealing.append(pool.submit(_seal, file, unsealed, aside, kept))
                done_bytes += file.bytes
                progress(done_bytes)
            for future in sealing:
                future.result()
        except BaseException:  # an interrupt, too: seal nothing more, then let it pass
            pool.shutdown(cancel_futures=True)
            raise


def _seal(file: OutputFile, unsealed: Path, aside: _Aside, kept: Any) -> None:
    """Hash a file, sync it, move it into place, and only then record that it is there."""
    record = {**_entry(unsealed), "kept": kept}
    to_disk(unsealed)
    unsealed.rename(aside.data / file.name)
    to_disk(aside.data)
    _write_synced(aside.root / "records" / f"{file.name}.json", json.dumps(record))


def _finish(job: ConversionJob, aside: _Aside) -> None:
    # Read back even our own records: a continued job must end in the same bytes.
    kept_values, entries = {}, {}
    for file in job.files:
        record = aside.record(file)
        if record is None:
            raise ConfigError(f"{file.name} in {aside.data} is gone or cut off; run again")
        kept_values[file.name] = record["kept"]
        entries[file.name] = {"bytes": record["bytes"], "sha256": record["sha256"]}
    for path in aside.data.iterdir():  # small files of a job that was killed in this function
        if path.name not in entries:
            _remove(path)
    job.finish(aside.data, kept_values)
    for path in sorted(aside.data.rglob("*")):
        name = str(path.relative_to(aside.data))
        if path.is_file() and name not in entries:
            to_disk(path)
            entries[name] = _entry(path)
    files = dict(sorted(entries.items()))
    manifest = {"format": FORMAT, "request": _as_json(job.request), "files": files}
    _write_synced(aside.data / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    os.rename(aside.data, job.out)  # an empty folder at ``out`` is replaced
    to_disk(job.out.parent)
    shutil.rmtree(aside.root)


def _as_json(request: dict[str, Any]) -> dict[str, Any]:
    """Return the request as a file gives it back: lists for tuples."""
    return json.loads(json.dumps(request))


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": _size(path), "sha256": _sha256(path)}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _write_synced(path: Path, text: str) -> None:
    write_whole(path, text, sync=True)
    to_disk(path.parent)
