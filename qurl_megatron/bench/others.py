"""How much of this machine others used meanwhile: CPU seconds of its cores less those of our own.

A figure that was taken beside another job says nothing of ours. The load average cannot tell whose
the load is; the kernel counts both sides, what the cores did, and what each process did. What a
hypervisor gave to other guests counts as others' work. The kernel's own threads, which write our
files out among other things, count as ours.
"""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

MOST = 0.05
"""Of the cores, that others may use: a figure may be as much wrong."""

# Interrupts are left out: nobody's process is charged for them.
WORKED = ("user", "nice", "system", "steal")
RESTED = ("idle", "iowait")
LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Look:
    """CPU seconds since some moment."""

    all: float  # that the cores could have worked
    worked: float  # that they did, for whomever
    own: float  # of them, for the processes looked at


class Others:
    """Watches the cores that this process may use, from its making on.

    Args:
        servers: URLs of engines whose work is ours, too; those of other machines are left out.
    """

    def __init__(self, servers: Iterable[str] = ()) -> None:
        self._roots = [psutil.Process(), *_kernel(), *_listeners(servers)]
        self._first = self._look()

    def share(self) -> float:
        """Of the cores, from 0 to 1, that others have used so far."""
        now = self._look()
        elapsed = now.all - self._first.all
        others = (now.worked - self._first.worked) - (now.own - self._first.own)
        return max(0.0, others) / elapsed if elapsed else 0.0

    def _look(self) -> Look:
        everything = psutil.cpu_times(percpu=True)
        cores = [everything[core] for core in os.sched_getaffinity(0)]
        worked, rested = (
            sum(getattr(core, kind) for core in cores for kind in kinds)
            for kinds in (WORKED, RESTED)
        )
        return Look(all=worked + rested, worked=worked, own=_spent(self._roots))


def _spent(roots: Iterable[psutil.Process]) -> float:
    """CPU seconds of processes and of all that came of them; of the dead ones, too: whoever waited
    for them has theirs in his account."""
    trees: set[psutil.Process] = set()
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            trees |= {root, *root.children(recursive=True)}
    total = 0.0
    for process in trees:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # user and system, its own and of dead children
    return total


def _kernel() -> list[psutil.Process]:
    """The parent of the kernel's threads; a container may not see it."""
    try:
        found = psutil.Process(2)
    except psutil.NoSuchProcess:
        return []
    return [found] if found.name() == "kthreadd" else []


def _listeners(urls: Iterable[str]) -> list[psutil.Process]:
    """The processes on this machine that answer at these URLs."""
    ports = {urlsplit(url).port for url in urls if urlsplit(url).hostname in LOCAL}
    if not ports:
        return []
    found = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port in ports
    }
    return [psutil.Process(pid) for pid in found - {None}]
