"""How much of this machine others used meanwhile: the CPU seconds of processes that are not ours.

A figure that was taken beside another job says nothing of ours. The load average cannot tell whose
the load is; the kernel counts for each process what it used, and what its dead children did. Its
own threads, which write our files out among other things, are nobody's. So are processes bound to
cores that we may not use, as jobs of Slurm are.

Ours are our descendants. An engine's workers may outlive the process that we started, by the second
that it takes to give gigabytes back, and would then be children of the machine's first process like
any stranger, with all that they have used in their lives. So while we watch, orphans come to us. We
bury those that have ended when we stop; those that have not stay our children until we end.
"""

import ctypes
import gc
import multiprocessing.popen_fork
import os
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

MOST = 0.05
"""Of the cores, that others may use: a figure may be as much wrong."""

INIT, KERNEL = 1, 2  # process numbers of the parents of orphans, and of the kernel's threads
ASKED = ("pid", "ppid", "name", "create_time", "cpu_times", "cpu_affinity")
LOCAL = ("localhost", "127.0.0.1", "::1")
SET_CHILD_SUBREAPER, GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h

Key = tuple[int, float]  # number and birth: numbers are given out again


@dataclass(frozen=True)
class Used:
    """What one process has used since it began."""

    seconds: float  # of CPU time, with that of its dead children
    parent: int  # its number


class Others:
    """Watches the cores that this process may use, from its making on; ``with`` it, orphans of ours
    remain ours.

    Args:
        servers: URLs of engines whose work is ours, too; those of other machines are left out.
    """

    def __init__(self, servers: Iterable[str] = ()) -> None:
        self._adopted = _adopts()
        self._roots = {os.getpid(), *_listeners(servers)}
        self._cores = os.sched_getaffinity(0)
        self._start = time.monotonic()
        self._first = self._look()

    def __enter__(self) -> "Others":
        self._before = {child.pid for child in psutil.Process().children()}
        _adopt(True)
        return self

    def __exit__(self, *_: object) -> None:
        _adopt(self._adopted)
        _bury_but(self._before)

    def share(self) -> float:
        """Of the cores, that others have used so far."""
        now = self._look()
        used = {key: it.seconds - _seconds(self._first.get(key)) for key, it in now.items()}
        numbers = {number: (number, born) for number, born in now}
        for key, it in self._first.items():
            # What a process used before we looked is charged to its parent when it dies.
            if key not in now and it.parent in numbers:
                used[numbers[it.parent]] -= it.seconds
        elapsed = (time.monotonic() - self._start) * len(self._cores)
        return sum(max(0.0, seconds) for seconds in used.values()) / elapsed

    def _look(self) -> dict[Key, Used]:
        """All processes that are neither ours nor the kernel's, and may use our cores."""
        seen = {process.pid: process.info for process in psutil.process_iter(ASKED)}
        children: dict[int, list[int]] = {}
        for pid, told in seen.items():
            children.setdefault(told["ppid"], []).append(pid)
        ours = _tree(self._roots, children)
        # In a container the second process may be anybody's.
        if seen.get(KERNEL, {}).get("name") == "kthreadd":
            ours |= _tree({KERNEL}, children)
        return {
            (pid, told["create_time"]): Used(_cpu_seconds(pid, told["cpu_times"]), told["ppid"])
            for pid, told in seen.items()
            if pid not in ours
            and told["cpu_times"]
            and self._cores & set(told["cpu_affinity"] or ())
        }


def _adopts() -> bool:
    """Whether this process becomes the parent of orphans among its descendants."""
    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(GET_CHILD_SUBREAPER, ctypes.byref(found))
    return bool(found)


def _adopt(orphans: bool) -> None:
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, int(orphans))


def _bury_but(spared: set[int]) -> None:
    """Take the statuses of children that have ended, but those that somebody here waits for."""
    children = psutil.Process().children()
    ended = {child.pid for child in children if child.status() == psutil.STATUS_ZOMBIE} - spared
    # Nothing tells an adopted child from our own, so we ask who holds the number.
    for pid in ended - _waited_for() if ended else ():
        with suppress(ChildProcessError):  # another thread was faster
            os.waitpid(pid, os.WNOHANG)


def _waited_for() -> set[int]:
    """Numbers of the processes whose exit codes objects of this process are to report."""
    tell = (subprocess.Popen, multiprocessing.popen_fork.Popen)
    return {it.pid for it in gc.get_objects() if issubclass(type(it), tell) and hasattr(it, "pid")}


def _seconds(used: Used | None) -> float:
    return used.seconds if used else 0.0


def _cpu_seconds(pid: int, times) -> float:
    """To the first process orphans are charged, of whomever."""
    return sum(times[:2] if pid == INIT else times[:4])


def _tree(roots: Iterable[int], children: dict[int, list[int]]) -> set[int]:
    found: set[int] = set()
    todo = list(roots)
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, ())
    return found


def _listeners(urls: Iterable[str]) -> set[int]:
    """The processes on this machine that answer at these URLs."""
    ports = {_local_port(url) for url in urls} - {None}
    if not ports:
        return set()
    return {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port in ports
    } - {None}


def _local_port(url: str) -> int | None:
    parts = urlsplit(url)
    try:
        return parts.port if parts.hostname in LOCAL else None
    except ValueError:  # not a number; the code that asks this engine says so
        return None
