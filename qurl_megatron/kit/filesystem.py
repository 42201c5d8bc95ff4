"""Trouble with file systems: they refuse to write, and show late the files of another node."""

import contextlib
import errno
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from qurl_megatron.kit.errors import ConfigError

CACHED_S = 90.0
"""Seconds to wait for a file; NFS caches directories for up to 60."""

FIXES = {
    errno.ENOSPC: "free some, or set {key} to a folder with more",
    errno.EDQUOT: "the quota is used up; free some, or set {key} to another folder",
    errno.EACCES: "set {key} to a folder this user may write",
    errno.EPERM: "set {key} to a folder this user may write",
    errno.EROFS: "set {key} to a folder that is not read-only",
    errno.ENOTDIR: "a file is in the way; set {key} to another folder, or move the file",
    errno.EEXIST: "a file is in the way; set {key} to another folder, or move the file",
    errno.ENOTEMPTY: "files are in the way; set {key} to another folder, or move them",
    errno.EISDIR: "a folder is in the way; remove it, or set {key} to another folder",
    errno.EFBIG: "files may not be as large here; raise the limit (ulimit -f), or set {key} to "
    "another folder",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n)",
    errno.ENAMETOOLONG: "set {key} to a shorter name",
    **dict.fromkeys(
        (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP),
        "its file system has no locks; have it mounted with them (Lustre: -o flock), or set {key} "
        "to a folder on another",
    ),
    errno.EIO: "the disk fails; set {key} to a folder on another",
}
"""Advice for a user where the system refuses to write."""
ELSEWHERE = "set {key} to another folder"


@contextlib.contextmanager
def refusing(
    path: Path, *, key: str, size: int | None = None, half_written: Path | None = None
) -> Iterator[None]:
    """Turn an ``OSError`` of ``FIXES`` into a sentence, and leave no half-written file.

    Args:
        path: the file or folder; a path that the system names itself comes first.
        key: recipe key of the folder.
        size: bytes that are to be written, where that is known.

    Raises:
        ConfigError: the system refused, for a reason that a user can fix.
    """
    try:
        yield
    except BaseException as error:
        if half_written is not None:
            with contextlib.suppress(OSError):
                half_written.unlink()
        if not isinstance(error, OSError) or not (error.errno in FIXES or _homeless(error, path)):
            raise
        raise refusal(error, path, key=key, size=size) from None


def _homeless(error: OSError, path: Path) -> bool:
    """Return whether no folder can be made above or beside ``path``, such as in /proc."""
    missing = error.filename if error.errno == errno.ENOENT else None
    return isinstance(missing, str) and Path(missing).parent in path.parents


def refusal(error: OSError, path: Path, *, key: str, size: int | None = None) -> ConfigError:
    room = f"{free(path) / 1e6:.1f} MB are free; "
    usage = os.statvfs(_folder_above(path))
    # Some file systems do not count inodes.
    if error.errno == errno.ENOSPC and usage.f_files > 0 and usage.f_favail == 0:
        room = "its file system has no room for another file, however small (inodes, df -i); "
    elif size is not None:
        room = f"{size / 1e6:.1f} MB are needed, {room}"
    elif error.errno not in (errno.ENOSPC, errno.EDQUOT):
        room = ""
    return ConfigError(
        f"{path} cannot be written ({os.strerror(error.errno or 0)}): {room}"
        f"{FIXES.get(error.errno or 0, ELSEWHERE).format(key=key)}"
    )


def free(path: Path) -> int:
    """Return the free bytes where a path lies, which need not exist."""
    return shutil.disk_usage(_folder_above(path)).free


def _folder_above(path: Path) -> Path:
    # os.path says no, and raises nothing, for a name that no folder can have.
    return next(p for p in (path, *path.absolute().parents) if os.path.isdir(p))


def wait_until_seen(path: Path, evidence: str, *, key: str, seconds: float = CACHED_S) -> None:
    """Return once this node sees ``path``; raise ``ConfigError`` if it does not appear.

    Args:
        evidence: why another node should have it, for the message.
        key: recipe key of the folder that must be shared.
    """
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{path} is not visible on {socket.gethostname()} after {seconds:g} s, although "
                f"{evidence}; set {key} to a folder that all nodes share"
            )
        # A failed lookup is cached too; listing the folders queries the server again.
        for folder in path.parents[:3]:
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                next(entries, None)
        time.sleep(0.5)
