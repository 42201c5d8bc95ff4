"""What is left of a run that is over: processes, files in shared memory, ports.

Every process that a run starts inherits a mark in its environment, whatever session it moves to and
whoever becomes its parent. SGLang's processes write over theirs to show a title, so those that
``look`` has seen once are known from then on.
"""

import contextlib
import os
import secrets
import time
from pathlib import Path

import psutil

from qurl_megatron.wire.lease import OWNER, Owner
from tests.support.waiting import PATIENCE_S

MARK = "QURL_TEST_RUN"
SHARED = "/dev/shm/"


class Footprint:
    """Start a run with ``env``, ``look`` while it lives, and ask what is ``left`` afterwards."""

    def __init__(self) -> None:
        self._mark = f"{MARK}={secrets.token_hex(8)}"
        self.env = {**os.environ, MARK: self._mark.partition("=")[2]}
        self._seen: dict[int, psutil.Process] = {}
        self._files: set[Path] = set()
        self._ports: set[int] = set()

    def processes(self) -> list[psutil.Process]:
        """All that live now, zombies left out."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                if self._mark.encode() in environment:
                    found[process.pid] = process
        self._seen |= found
        return [process for process in self._seen.values() if _lives(process)]

    def look(self) -> list[psutil.Process]:
        """Remember also what the processes have in shared memory, and where they listen."""
        for process in (processes := self.processes()):
            with contextlib.suppress(OSError, psutil.Error):
                for child in process.children(recursive=True):
                    self._seen.setdefault(child.pid, child)
                self._ports |= {
                    connection.laddr.port
                    for connection in process.net_connections("tcp")
                    if connection.status == psutil.CONN_LISTEN
                }
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                self._files |= {
                    Path(line[line.index(SHARED) :])
                    for line in maps.splitlines()
                    if SHARED in line and not line.endswith(" (deleted)")
                }
        return processes

    def left(self, run_dir: Path | None = None, seconds: float = PATIENCE_S) -> list[str]:
        """In words, after a while in which it may go; empty where all is clean.

        Args:
            run_dir: its token names what it has in shared memory.
        """
        end = time.monotonic() + seconds
        while (found := self._left(run_dir)) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def _left(self, run_dir: Path | None) -> list[str]:
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                what = f"process {process.pid} of {process.ppid()}, {process.status()}"
                found.append(f"{what}: {' '.join(process.cmdline())}")
        files = {file for file in self._files if file.exists()}
        if run_dir is not None and (run_dir / OWNER).exists():
            files |= set(Path(SHARED).glob(f"qurl-{Owner.of(run_dir).token}*"))
        # Somebody else's process may have taken a port that has become free.
        listening = {
            connection.laddr.port
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.pid in {None, *self._seen}
        }
        return found + sorted(map(str, files)) + [f"port {p}" for p in self._ports & listening]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
