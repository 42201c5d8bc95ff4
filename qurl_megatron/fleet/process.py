"""An engine's process: its log, its port file, and how it ends together with its children.

Its environment has no launcher's variables (``kit.children``), and it may use all of the job's
cores. It has a session of its own, so Ctrl-C in the terminal reaches the trainer alone, which can
save first. It ends when the trainer is gone, for whatever reason: it watches its standard input, a
pipe whose other end only the trainer holds. An engine that is stopped or stuck is killed with all
its children (``kit.undertaker``).
"""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from qurl_megatron.engines.starting import Launch, port_file
from qurl_megatron.kit.children import children_cores, on_cores, without_launcher
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import free
from qurl_megatron.kit.undertaker import bury, remove, shared_by, spare

PORT = re.compile(r"[1-9][0-9]{0,4}")
LOG_TAIL = 20  # lines quoted when an engine dies
LOG_ROOM = 1 << 16  # free bytes below which a disk counts as full: the last lines may be missing


def url_at(host: str, port: int) -> str:
    """Return the URL of an engine that listens there."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"  # IPv6, or not


class EngineProcess:
    """One engine's processes, one after another; each continues the log of the one before."""

    def __init__(
        self, name: str, launch: Launch, folder: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            launch: how to start it; it writes its port to ``port_file(folder, name)``.
            folder: gets NAME.log.
            clock: in seconds, for ``heard``.
        """
        self.name, self._clock = name, clock
        self.log = folder / f"{name}.log"
        self._port_file = port_file(folder, name)
        self.launch = launch
        self._mode = "wb"
        self._heard = (0, 0.0)  # size of the log, and when it came to that
        self._shared: set[str] = set()  # files in memory
        self._looking = threading.Lock()  # held while processes are looked at, or forgotten
        self.popen: subprocess.Popen | None = None

    def start(self) -> None:
        """Start it; raise ``ConfigError`` where the command cannot be run."""
        self._port_file.unlink(missing_ok=True)
        self._forget()
        try:
            with self.log.open(self._mode) as out, on_cores(children_cores()):
                self.popen = subprocess.Popen(
                    self.launch.command,
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**without_launcher(os.environ), **self.launch.env},
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(f"{self.launch.command[0]} cannot be started: {error}") from None
        bury(self.popen.pid)
        self._mode = "ab"
        self._heard = (0, self._clock())

    def heard(self) -> float:
        """Return when its log was last seen to grow; every call looks."""
        with contextlib.suppress(FileNotFoundError):
            size = self.log.stat().st_size
            if size != self._heard[0]:
                self._heard = size, self._clock()
        return self._heard[1]

    def last_line(self) -> str:
        """Return the last line of its log; a progress bar counts as it stands now."""
        with contextlib.suppress(FileNotFoundError), self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - 4096))
            lines = log.read().decode("utf-8", "replace").replace("\r", "\n").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""

    def port(self) -> int | None:
        """Return the port at which it listens; None until it has reported one."""
        with contextlib.suppress(FileNotFoundError):
            port = self._port_file.read_text(encoding="utf-8", errors="replace").strip()
            if PORT.fullmatch(port):
                return int(port)
        return None

    def exited(self, wait_s: float = 0.0) -> str | None:
        """Return its exit status and the end of its log; None while it lives."""
        popen = self.popen  # ``stop`` may take it away meanwhile
        if popen is None:
            return None
        try:
            status = popen.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL:]
        if not lines and (room := free(self.log)) < LOG_ROOM:
            return (
                f"exited with status {status} and could not write {self.log}: {room} bytes are free"
                " on its disk; free some, or name a folder on another"
            )
        return f"exited with status {status}; see {self.log}:\n" + "\n".join(lines)

    def look(self) -> None:
        """Remember the files that its processes share in memory, to remove them afterwards.

        Looks at all processes of the machine, which may take long: hold no lock meanwhile.
        """
        with self._looking:
            if self.popen is not None:
                for file in shared_by([self.popen.pid]) - self._shared:
                    bury(Path(file))
                    self._shared.add(file)

    def leave(self) -> None:
        """Ask it to end by itself."""
        self.look()
        if self.popen is not None:
            assert self.popen.stdin is not None, "it watches a pipe"
            with contextlib.suppress(BrokenPipeError):  # it is gone already
                self.popen.stdin.close()
            self.popen.terminate()

    def kill(self) -> None:
        """Kill it and every process it started: a stopped one ignores every other signal."""
        self.look()
        if self.popen is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it, and wait until it is gone."""
        self.kill()  # and children that outlived it
        if self.popen is not None:
            self.popen.wait()
        self._forget()

    def _forget(self) -> None:
        with self._looking:
            if self.popen is not None:
                spare(self.popen.pid)
                while self._shared:
                    remove(Path(self._shared.pop()))
                self.popen = None


def stop(processes: Sequence[EngineProcess], grace_s: float) -> None:
    """Ask all to end, wait for all together, then kill those that are left."""
    running = [(process, process.popen) for process in processes if process.popen is not None]
    for process, _ in running:
        process.leave()
    deadline = time.monotonic() + grace_s
    for process, popen in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(max(0.0, deadline - time.monotonic()))
        process.end()
