"""End a process's children and remove its files when it ends: ``atexit``, for SIGKILL too.

A process that has children, or files in memory, starts an undertaker: a small process in a session
of its own, which keeps a list and acts when its owner is gone, or the launcher that a rank must not
outlive. It sees that at once by the end of a socket; where a forked child holds the other end, too,
within ``POLL_S``, by having another parent.

A folder's name, and the number of its inode once that is free, may be another folder's by then. So
the undertaker holds a folder open, which keeps the number from being used again.

The file is run by itself, without the package: every rank starts one.
"""

import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

POLL_S = 0.5
MESSAGE = 1 << 16  # bytes of an order at most; a path has 4096
LEAVING_S = 0.01  # between looks while something is on its way out
SGLANGS = ("/dev/shm/sgl_shm_", "/dev/shm/sglang_loads_")
"""Shared memory of SGLang's processes; 25 MB for an engine of several ranks. They kill each other
even at a clean end, and remove none of it."""
PATIENCE_S = 1.0
"""Between SIGTERM and SIGKILL: resource trackers ignore the first, and have work to do."""


def bury(target: int | Path) -> None:
    """Have something end with this process: a process group, a folder, or a file of ``SGLANGS``.

    A folder that somebody makes under the same name later is spared.

    Raises:
        OSError: there is no such folder, or it is another file.
    """
    if isinstance(target, int):
        return _hired().write(["bury", target])
    if str(target).startswith(SGLANGS):
        return _hired().write(["bury", str(target)])
    folder = os.open(target, os.O_PATH | os.O_DIRECTORY)
    try:
        _hired().write(["bury", str(target)], folder)
    finally:
        os.close(folder)


def spare(target: int | Path) -> None:
    """Undo ``bury`` for something that has ended: its number may become somebody else's."""
    if isinstance(target, Path):
        return _hired().write(["spare", str(target)])
    return _hired().write(["spare", target])


def remove(path: Path) -> None:
    """Remove a name given to ``bury``; if that fails it is tried again at the end."""
    if str(path).startswith(SGLANGS):
        _unlink(str(path))
    else:
        shutil.rmtree(path, ignore_errors=True)
    if not path.exists():
        spare(path)


def shared_by(groups: Iterable[int]) -> set[str]:
    """Return SGLang's files in memory that processes of these groups have mapped."""
    groups, names = set(groups), set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or is somebody else's
            if os.getpgid(int(pid)) in groups:
                maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
                names |= {name for name in maps.split() if name.startswith(SGLANGS)}
    return names


def _unlink(file: str) -> None:
    with suppress(OSError):  # it went by itself
        os.unlink(file)


class _Undertaker:
    def __init__(self) -> None:
        import multiprocessing  # the undertaker itself needs neither, and starts sooner
        import subprocess

        self.owner = os.getpid()
        # One message is one order, so that threads do not mix theirs.
        self._orders, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        launcher = multiprocessing.parent_process()
        lifelines = []
        if launcher is not None:
            lifelines.append(launcher.sentinel)
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(self.owner), *map(str, lifelines)],
                stdin=child_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a reader of ours need not wait for it
                pass_fds=lifelines,
                start_new_session=True,
            )

    def write(self, order: list, *opened: int) -> None:
        # An undertaker that was killed is no reason to end: its work is needed only where
        # we are killed as well.
        with suppress(ConnectionError):
            socket.send_fds(self._orders, [json.dumps(order).encode()], opened)


_own: _Undertaker | None = None
_hiring = threading.Lock()


def _hired() -> _Undertaker:
    """Return this process' own; a forked one does not give orders to its parent's."""
    global _own
    with _hiring:
        if _own is None or _own.owner != os.getpid():
            _own = _Undertaker()
        return _own


def main(owner: int, lifelines: list[int]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # batch systems send them to all
        signal.signal(number, signal.SIG_IGN)
    leftovers = _until_gone(owner, lifelines)
    if os.getppid() == owner:
        os.kill(owner, signal.SIGKILL)
    groups = [leftover for leftover in leftovers if isinstance(leftover, int)]
    names = [leftover for leftover in leftovers if isinstance(leftover, str)]
    # Groups that are gone tell nothing, and not every process has been reported.
    files = shared_by(groups) | {name for name in names if name.startswith(SGLANGS)}
    _end(groups)
    for file in files:
        _unlink(file)
    for leftover, folder in leftovers.items():
        with suppress(OSError):  # the name is gone, or the file system is
            if folder is not None and os.path.samestat(os.stat(leftover), os.fstat(folder)):
                shutil.rmtree(str(leftover), ignore_errors=True)


def _until_gone(owner: int, lifelines: list[int]) -> dict[int | str, int | None]:
    """Return the list to bury once the owner, or the holder of a lifeline's other end, is gone.

    The end of standard input says only that the owner is leaving, which may take a while.

    Returns:
        Process groups, and the names of folders with the descriptor that each is held by.
    """
    leftovers: dict[int | str, int | None] = {}
    orders, leaving = socket.socket(fileno=0), False
    while True:
        gone = os.getppid() != owner  # perhaps before we began
        watched, wait_s = [0, *lifelines], POLL_S
        if leaving:
            watched, wait_s = lifelines, LEAVING_S
        if gone:
            wait_s = 0.0
        ready, _, _ = select.select(watched, [], [], wait_s)
        if 0 in ready:
            message, opened, _, _ = socket.recv_fds(orders, MESSAGE, 1)
            if not message:
                leaving = True
                continue
            order, leftover = json.loads(message)
            if (descriptor := leftovers.pop(leftover, None)) is not None:
                os.close(descriptor)
            if order == "bury":
                leftovers[leftover] = next(iter(opened), None)
        elif gone or ready:
            return leftovers


def _end(groups: list[int]) -> None:
    for number, patience in ((signal.SIGTERM, PATIENCE_S), (signal.SIGKILL, 0.0)):
        groups = [group for group in groups if _signal(group, number)]
        end = time.monotonic() + patience
        while time.monotonic() < end and any(_signal(group, 0) for group in groups):
            time.sleep(LEAVING_S)


def _signal(group: int, number: int) -> bool:
    """Send a signal; return False where nobody is left, or the number is another user's by now."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(line) for line in sys.argv[2:]])
