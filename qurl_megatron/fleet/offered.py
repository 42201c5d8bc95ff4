"""This machine's engines, started here and offered to the leading rank, wherever that runs.

Engines meet the trainer in ``rollout.rendezvous``: each engine that listens has an entry there,
which is removed when the engine is gone. Engines choose their own ports, so that two jobs on a node
cannot collide. The key is in a file beside the entries, which only the user can read; the engines
get it in their environment.
"""

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from qurl_megatron.engines.starting import Start
from qurl_megatron.fleet import process
from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import refusing
from qurl_megatron.kit.place import own_name

KEY = "key"
"""Name of the file with the engines' key, in the rendezvous folder."""
POLL_S = 0.5
GRACE_S = 10.0
PAUSE_S = 5.0
"""Seconds before an engine that ended is started again; twice as long each time."""


def prepare(rendezvous: Path) -> str:
    """Make the folder where trainer and engines meet; remove the entries of earlier attempts.

    Returns:
        The engines' key.
    """
    with refusing(rendezvous, key="rollout.rendezvous"):
        rendezvous.mkdir(mode=0o700, parents=True, exist_ok=True)
        for entry in rendezvous.glob("*.json"):
            entry.unlink()
        key = rendezvous / KEY
        if not key.exists():
            write_whole(key, secrets.token_urlsafe(32), private=True)
        return key.read_text(encoding="utf-8").strip()


class Offering:
    """Context manager: inside, this machine's engines run and are offered; leaving ends them."""

    def __init__(self, start: Start, rendezvous: Path) -> None:
        """Raise ``ConfigError`` where the engines cannot be started here."""
        self._may_start = True
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        with refusing(start.folder, key="train.run_dir"):
            start.folder.mkdir(parents=True, exist_ok=True)
        self._engines = []
        for name, launch in start.launches().items():
            engine = process.EngineProcess(name, launch, start.folder)
            entry = rendezvous / f"{own_name()}-{name}.json"
            host, restarts = start.config.engine_host, start.config.max_restarts
            self._engines.append(Offered(engine, entry, host, restarts))

    def __enter__(self) -> "Offering":
        return self

    def look(self) -> bool:
        """Look after every engine; return False once all are given up."""
        for engine in self._engines:
            engine.look(time.monotonic(), may_start=self._may_start)
        return not all(engine.given_up for engine in self._engines)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, the trainer has the engines' memory, so no engine is started."""
        self._may_start = False
        try:
            yield
        finally:
            self._may_start = True

    def watch(self) -> None:
        """Look after the engines on a thread from now on."""

        def run() -> None:
            while not self._ended.wait(POLL_S):
                try:
                    self.look()
                except ConfigError as error:  # the disk may have room at the next look
                    print(f"qurl: {error}", flush=True)

        self._thread = threading.Thread(target=run, name="engines", daemon=True)
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._thread:
            self._thread.join()
        for engine in self._engines:
            engine.withdraw()
        process.stop([engine.process for engine in self._engines], GRACE_S)


class Offered:
    """One engine, and its entry in the rendezvous."""

    def __init__(
        self, process: process.EngineProcess, entry: Path, host: str, max_restarts: int
    ) -> None:
        self.process, self._entry, self._host = process, entry, host
        self._restarts_left = max_restarts
        self._start_at: float | None = 0.0  # monotonic; None: it runs
        self._pause = PAUSE_S

    @property
    def given_up(self) -> bool:
        return self._restarts_left < 0

    def look(self, now: float, *, may_start: bool = True) -> None:
        """Start the engine, offer it, or notice its end, whichever is due."""
        if self.given_up:
            return
        if self._start_at is not None:
            if now >= self._start_at and may_start:
                self._start_at = now + PAUSE_S  # of the next try, where this one fails
                self.process.start()
                self._start_at = None
            return
        if (death := self.process.exited()) is not None:
            self.withdraw()
            self.process.end()
            self._restarts_left -= 1
            self._start_at, self._pause = now + self._pause, 2 * self._pause
            print(f"qurl: {self.process.name} {death}", flush=True)
            return
        port = self.process.port()
        if port is not None and not self._entry.exists():
            url = process.url_at(self._host, port)
            with refusing(self._entry, key="rollout.rendezvous"):
                write_whole(self._entry, json.dumps({"url": url, "api_key_file": KEY}) + "\n")
            print(f"qurl: {self.process.name} listens at {url}", flush=True)

    def withdraw(self) -> None:
        self._entry.unlink(missing_ok=True)
