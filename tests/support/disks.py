"""Small disks that fill up; files that are compared, and damaged."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A filesystem of its own; skips the test where there may be none."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"only root can make a small disk: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder by their relative names."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def flip(path: Path) -> None:
    """Damage one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def fill(disk: Path, *, leave: int = 0) -> Path:
    """Write a file that takes all room but ``leave`` bytes."""
    path = disk / "filler"
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while (room := _room(disk) - leave) > 0:
            file.write(b"x" * min(room, 1 << 20))
    return path


def exhaust_names(disk: Path) -> None:
    """Make files until there can be no more, not even empty ones."""
    with contextlib.suppress(OSError):
        for number in range(1_000_000):
            (disk / f"name-{number}").touch()


def _room(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_bsize
