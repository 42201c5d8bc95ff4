"""A folder of large files, written so that it is there whole or not at all, and can be continued.

    .OUT.partial/            what a killed job leaves; no reader takes it for a checkpoint
      job.json               what was asked for: only the same job continues here
      records/FILE.json      written when FILE is whole, synced and in place
      FILE
    OUT/                     the same folder, renamed in the end
      qurl_manifest.json     what was asked for; size and SHA-256 of every file

Files are independent of each other, so several ranks share them; the first one does the rest.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from qurl_megatron.convert.workers import ALONE, Workers
from qurl_megatron.errors import ConfigError

MANIFEST = "qurl_manifest.json"
FORMAT = "qurl-checkpoint-1"

# Files that wait to be hashed and synced, each by a thread, while the next one is written.
_SEALERS = 2

# What a person can mend: no room, no permission, a file or folder in the way.
_MENDABLE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EEXIST,
)


@dataclass(frozen=True)
class OutputFile:
    """One large file of the folder."""

    name: str
    bytes: int
    write: Callable[[Path], Any]
    """Writes the file; what it returns, as JSON, is kept for ``Job.finish``."""


@dataclass(frozen=True)
class Job:
    """A folder to be written."""

    out: Path
    request: dict[str, Any]
    """Everything that decides what is written, as JSON."""
    files: list[OutputFile]
    finish: Callable[[Path, dict[str, Any]], None]
    """Given the folder and what each file's ``write`` returned: writes the small files."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def run(
    job: Job,
    *,
    workers: Workers = ALONE,
    restart: bool = False,
    checksums: bool = True,
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
    with workers.together(), _disk_errors(job.out):
        if _is_done(job.out, request):
            return False
    aside = partial_folder(job.out)
    lock = None
    with workers.together(), _disk_errors(aside):
        if workers.leads:
            lock = _claim(aside)
            _reopen(aside, request, restart)
            _check_space(job, aside)
    with lock or nullcontext():
        with workers.together(), _disk_errors(aside):
            _write_share(job, aside, workers, checksums)
        with workers.together(), _disk_errors(aside):
            if workers.leads:
                _finish(job, aside, request, checksums)
    return True


def bytes_on_disk(job: Job) -> int:
    """How much of a job's large files is written, by all workers; for showing progress."""
    aside = partial_folder(job.out)
    names = [name for file in job.files for name in (file.name, f"{file.name}.tmp")]
    return sum(_size(aside / name) for name in names)


def partial_folder(out: Path) -> Path:
    """Where a job writes before its folder is whole."""
    return out.parent / f".{out.name}.partial"


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder a job wrote; None where it has none."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is damaged ({error}); convert the checkpoint again") from None
    return found if found.get("format") == FORMAT else None


def verify(folder: Path) -> list[str]:
    """What is wrong with the files of a folder, by its manifest: one sentence per file.

    Raises:
        ConfigError: the folder has no manifest.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise ConfigError(f"{folder} has no {MANIFEST}: it was not written by these tools")
    wrong = []
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif path.stat().st_size != entry["bytes"]:
            wrong.append(f"{name} has {path.stat().st_size} bytes, written were {entry['bytes']}")
        elif entry["sha256"] and _sha256(path) != entry["sha256"]:
            wrong.append(f"{name} has changed: its SHA-256 is not the one of the manifest")
    return wrong


# -- steps ---------------------------------------------------------------------------------------


def _is_done(out: Path, request: dict[str, Any]) -> bool:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    manifest = read_manifest(out) if out.is_dir() else None
    if manifest and manifest["request"] == request:
        return True
    raise ConfigError(f"{out} exists already; remove it or name another --out")


def _claim(aside: Path) -> TextIO:
    """Make or reopen the aside folder and lock it; the lock lasts until it is closed."""
    try:
        aside.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {aside}: {error.strerror}; name another --out") from error
    lock = (aside / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"another job is writing {aside}; wait for it or name another --out"
        ) from None
    return lock


def _reopen(aside: Path, request: dict[str, Any], restart: bool) -> None:
    asked = aside / "job.json"
    if asked.is_file():
        before = json.loads(asked.read_text(encoding="utf-8"))
        if before == request:
            return
        if not restart:
            changed = sorted(
                key for key in before.keys() | request.keys() if before.get(key) != request.get(key)
            )
            raise ConfigError(
                f"{aside} holds an unfinished job with another {' and '.join(changed)}; "
                "give --restart to throw it away, or name another --out"
            )
    for path in aside.iterdir():
        if path.name != ".lock":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (aside / "records").mkdir()
    _write_synced(asked, json.dumps(request))


def _check_space(job: Job, aside: Path) -> None:
    needed = sum(file.bytes for file in job.files if not _record(aside, file).is_file())
    free = shutil.disk_usage(aside).free
    if needed > free:
        raise ConfigError(
            f"{aside.parent} has {free / 1e9:.2f} GB free, {job.out.name} needs "
            f"{needed / 1e9:.2f} GB more; free some space or name another --out"
        )


def _write_share(job: Job, aside: Path, workers: Workers, checksums: bool) -> None:
    """Write this worker's files; whole ones are hashed and synced while the next is written."""
    with ThreadPoolExecutor(_SEALERS) as pool:
        sealing: list[Future] = []
        try:
            for file in workers.share(job.files, size=lambda file: file.bytes):
                if _record(aside, file).is_file():
                    continue
                while len(sealing) >= _SEALERS:
                    sealing.pop(0).result()
                unsealed = aside / f"{file.name}.tmp"
                kept = file.write(unsealed)
                sealing.append(pool.submit(partial(_seal, file, unsealed, aside, kept, checksums)))
            for future in sealing:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _seal(file: OutputFile, unsealed: Path, aside: Path, kept: Any, checksums: bool) -> None:
    """Hash what was written, sync it, move it into place, and only then say that it is there."""
    with ThreadPoolExecutor(1) as disk:  # is busy while this thread hashes
        synced = disk.submit(_sync, unsealed)
        record = {
            "bytes": unsealed.stat().st_size,
            "sha256": _sha256(unsealed) if checksums else None,
            "kept": kept,
        }
        synced.result()
    unsealed.rename(aside / file.name)
    _write_synced(_record(aside, file), json.dumps(record))


def _finish(job: Job, aside: Path, request: dict[str, Any], checksums: bool) -> None:
    # Read back even what this process wrote: a continued job must end in the same bytes.
    records = {file.name: json.loads(_record(aside, file).read_text("utf-8")) for file in job.files}
    job.finish(aside, {name: record["kept"] for name, record in records.items()})
    entries = {n: {"bytes": r["bytes"], "sha256": r["sha256"]} for n, r in records.items()}
    for path in sorted(aside.rglob("*")):
        name = str(path.relative_to(aside))
        if path.is_file() and name not in entries and not _is_own(name):
            _sync(path)
            entries[name] = {
                "bytes": path.stat().st_size,
                "sha256": _sha256(path) if checksums else None,
            }
    manifest = {"format": FORMAT, "request": request, "files": dict(sorted(entries.items()))}
    _write_synced(aside / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    shutil.rmtree(aside / "records")
    (aside / "job.json").unlink()
    (aside / ".lock").unlink()
    _sync(aside)
    os.rename(aside, job.out)  # an empty folder at ``out`` is replaced
    _sync(job.out.parent)


def _is_own(name: str) -> bool:
    return name in ("job.json", ".lock", MANIFEST) or name.startswith("records/")


def _record(aside: Path, file: OutputFile) -> Path:
    return aside / "records" / f"{file.name}.json"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # not begun, or renamed a moment ago
        return 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_synced(path: Path, text: str) -> None:
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    _sync(unfinished)
    unfinished.rename(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Say in one sentence what the operating system refused, where a person can mend it."""
    try:
        yield
    except OSError as error:
        if error.errno not in _MENDABLE:
            raise
        raise ConfigError(
            f"cannot write {error.filename or path}: {error.strerror}; mend that or name another "
            "--out, and run again to continue"
        ) from error
