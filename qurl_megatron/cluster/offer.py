"""``qurl slurm offer``: the engines of one rollout node, started by ``srun``.

It writes an entry into ``rollout.rendezvous`` for each engine that listens, and takes it away when
the engine is gone; the trainer adopts and drops engines as entries come and go. Ports are the
engines' own choice, so that two jobs on a node cannot meet. The key is in a file beside the
entries, which only the user can read; it reaches the engines in their environment.
"""

import contextlib
import ipaddress
import json
import os
import secrets
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from threading import Event

from qurl_megatron.cluster import commands, folder
from qurl_megatron.cluster.layout import lay_out
from qurl_megatron.cluster.task import stop_on_usr1
from qurl_megatron.config import RunConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import refusing
from qurl_megatron.kit.network import own_address

KEY = "key"
"""File of the engines' key, in the rendezvous folder."""
POLL_S = 0.5
GRACE_S = 10.0
PAUSE_S = 5.0
"""Before an engine that ended is started again; twice as long each time."""
OUTWARD = "192.0.2.1"
"""Reserved for documentation: the default route leads there."""


def prepare(rendezvous: Path) -> None:
    """Make the folder where trainer and engines meet, without entries of earlier attempts."""
    with refusing(rendezvous, key="rollout.rendezvous"):
        rendezvous.mkdir(mode=0o700, parents=True, exist_ok=True)
        for entry in rendezvous.glob("*.json"):
            entry.unlink()
        key = rendezvous / KEY
        if not key.exists():
            # Never readable for others, not even for the moment until its mode is set.
            file = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "w") as out:
                out.write(secrets.token_urlsafe(32))


def offer(run_dir: Path, towards: str) -> int:
    """Start this node's engines, and keep the rendezvous true until SIGUSR1 or SIGTERM.

    Args:
        towards: name or address of the trainer's first node; engines listen on the address of this
            node on the way there.

    Returns:
        0 after a signal; 1 where no engine can be kept alive.

    Raises:
        ConfigError: nothing was submitted there, or the engines cannot be started.
    """
    ended = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    stop_on_usr1()
    config, cluster = folder.recipe(run_dir), folder.cluster(run_dir)
    layout = lay_out(config.parallel, config.rollout, cluster.node)
    node, host = own_name(), address_towards(towards)
    rendezvous = Path(config.rollout.rendezvous)
    engines = _engines(config, run_dir / "logs" / node, layout.engines, host, rendezvous)
    offered = []
    for process in engines:
        entry = rendezvous / f"{node}-{process.name}.json"
        offered.append(Offered(process, entry, host, config.rollout.max_restarts))
    try:
        while not ended.wait(POLL_S):
            for engine in offered:
                engine.look(time.monotonic())
            if all(engine.given_up for engine in offered):
                return 1
    finally:
        from qurl_megatron.fleet.process import stop

        for engine in offered:
            engine.withdraw()
        stop(engines, GRACE_S)
    return 0


class Offered:
    """One engine, and its entry in the rendezvous."""

    def __init__(self, process, entry: Path, host: str, max_restarts: int) -> None:
        self._process, self._entry = process, entry
        self._host = f"[{host}]" if ":" in host else host
        self._restarts_left = max_restarts
        self._start_at: float | None = 0.0  # monotonic; None: it runs
        self._pause = PAUSE_S

    @property
    def given_up(self) -> bool:
        return self._restarts_left < 0

    def look(self, now: float) -> None:
        """Start it, offer it, or take note of its end, whichever is due."""
        if self.given_up:
            return
        if self._start_at is not None:
            if now >= self._start_at:
                self._process.start()
                self._start_at = None
            return
        if (death := self._process.exited()) is not None:
            self.withdraw()
            self._process.end()
            self._restarts_left -= 1
            self._start_at, self._pause = now + self._pause, 2 * self._pause
            print(f"qurl: {self._process.name} {death}", flush=True)
            return
        port = self._process.port()
        if port is not None and not self._entry.exists():
            url = f"http://{self._host}:{port}"
            folder.put(self._entry, json.dumps({"url": url, "api_key_file": KEY}) + "\n")
            print(f"qurl: {self._process.name} listens at {url}", flush=True)

    def withdraw(self) -> None:
        self._entry.unlink(missing_ok=True)


def _engines(config: RunConfig, logs: Path, count: int, host: str, rendezvous: Path) -> list:
    from qurl_megatron.fleet.process import EngineProcess, launches

    settings = replace(
        config.rollout, engines=count, engine_host=host, engine_first_gpu=0, rendezvous=""
    )
    logs.mkdir(parents=True, exist_ok=True)
    launches_by_name = launches(
        settings,
        Path(config.model.path),
        logs,
        scheme=config.quant.scheme,
        dtype=config.model.dtype,
        api_key=(rendezvous / KEY).read_text(encoding="utf-8").strip(),
    )
    return [EngineProcess(name, launch, logs) for name, launch in launches_by_name.items()]


# ---- addresses: nodes' names may mean nothing to one another


def own_name() -> str:
    """Return Slurm's name of this node."""
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())


def address_towards(towards: str) -> str:
    """Return this node's address on the way to another."""
    try:
        return own_address(towards)
    except OSError as error:
        raise ConfigError(
            f"{towards}, the trainer's first node, cannot be reached from {socket.gethostname()} "
            f"({error}); its name must resolve on rollout nodes"
        ) from None


def address_for_others(node: str) -> str:
    """Return an address at which other nodes reach this one.

    Args:
        node: Slurm's name of it.

    Returns:
        The controller's address of it. Where the controller has a name that this node does not
        know, or knows as itself: the address on the default route; without one, the name.
    """
    name = commands.node_address(node)
    with contextlib.suppress(OSError):  # no such name
        address = str(socket.getaddrinfo(name, None)[0][4][0])
        if address == name or not ipaddress.ip_address(address).is_loopback:
            return address
    with contextlib.suppress(OSError):  # no default route
        return own_address(OUTWARD)
    return name
