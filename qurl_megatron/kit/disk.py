"""Files and folders that appear whole, locked files, and JSON files from outside."""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from qurl_megatron.kit.errors import ConfigError, reading


def write_whole(
    path: Path, content: str | bytes, *, sync: bool = False, private: bool = False
) -> None:
    """Write ``path``, text as UTF-8; readers see the old file or the new one, never a part.

    Args:
        sync: have the disk hold the content before the name changes.
        private: only this user may read it.

    Raises:
        OSError: the system refused; the old file is whole, and nothing is left beside it.
    """
    scratch = path.with_name(f".{path.name}.new")  # a search for *.json must not find it
    try:
        with scratch.open("wb") as file:
            if private:
                os.fchmod(file.fileno(), 0o600)
            file.write(content.encode() if isinstance(content, str) else content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a scratch folder beside ``path`` that becomes ``path`` when the block ends well.

    A block that raises leaves nothing behind.

    Raises:
        ConfigError: ``path`` exists and is not an empty folder.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{path} exists already; remove it or name another folder")
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    scratch.mkdir(parents=True)
    try:
        yield scratch
        os.rename(scratch, path)  # an empty folder at ``path`` is replaced
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object.

    Raises:
        Unreadable: the system cannot read it.
        ConfigError: it is missing, or holds something else.
    """
    try:
        with reading(path):
            content = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing") from None
    try:
        value = json.loads(content.decode())
    except RecursionError:
        raise ConfigError(f"{path} is not valid JSON: its brackets nest too deeply") from None
    except ValueError as error:  # no UTF-8, no JSON, or a number of too many digits
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def lock(file: IO) -> bool:
    """Lock an open file until it is closed; False where another process holds it, ``OSError`` where
    the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def claimed(out: Path, tool: str) -> Iterator[None]:
    """Lock the folder of --out inside the block; raise ``ConfigError`` if another ``tool`` works
    there, or it cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock_file = (out / ".lock").open("a")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from None
    with lock_file:
        if not lock(lock_file):
            raise ConfigError(
                f"{tool} is at work in {out}; wait for it, stop it, or give another --out"
            )
        yield
