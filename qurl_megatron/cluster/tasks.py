"""What ``srun`` starts in a job: a training rank (``qurl slurm task``), and the engines of one
rollout node (``qurl slurm offer``).

Of the signals that srun passes on, SIGTERM ends the step at once, and some clusters give a signal
to all that a task has started, engines included. So the supervisor sends SIGUSR1, which is blocked
here, and hence in every thread and child; a thread waits for it and tells the task with SIGTERM.

SIGUSR2 asks for stacks, which a rank writes into its attempt's folder even where it is stuck in
native code: Python's own handler needs no interpreter. It is blocked for children in the same way.

A rank that has saved and stopped ends with 0: srun, which is to end all ranks as soon as one of
them fails, would take any other code for a failure, and kill those that are still writing.

Engines meet the trainer in ``rollout.rendezvous``: an entry for each that listens, which goes when
the engine is gone. Ports are the engines' own choice, so that two jobs on a node cannot meet. The
key is in a file beside the entries, which only the user can read; it reaches the engines in their
environment.
"""

import faulthandler
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path

from qurl_megatron.cluster import folder
from qurl_megatron.cluster.layout import lay_out
from qurl_megatron.cluster.verdict import STOPPED
from qurl_megatron.config import RunConfig
from qurl_megatron.kit.filesystem import refusing
from qurl_megatron.observe import failures
from qurl_megatron.observe.failures import FOLDER

KEY = "key"
"""File of the engines' key, in the rendezvous folder."""
POLL_S = 0.5
GRACE_S = 10.0
PAUSE_S = 5.0
"""Before an engine that ended is started again; twice as long each time."""


def task(run_dir: Path) -> int:
    """Train as the rank that Slurm's variables name, with the recipe that was submitted.

    Returns:
        0 also after a clean stop; else what ``qurl train`` returns.

    Raises:
        ConfigError: nothing was submitted there, or what ``qurl train`` raises.
    """
    attempt = os.environ.get(FOLDER)
    stacks = None
    if attempt:
        stacks = folder.stack_file(Path(attempt), int(os.environ.get("SLURM_PROCID", "0")))
    stop_on_usr1(stacks)
    forget_hook(os.environ)
    try:
        config = folder.recipe(run_dir)
        from qurl_megatron.training.start import start

        code = start(config)
    except Exception as error:
        failures.keep(error)
        raise
    if code == STOPPED:
        return 0
    return code


def stop_on_usr1(stacks: Path | None = None) -> None:
    """Take SIGUSR1 as SIGTERM from here on, and hide it and SIGUSR2 from all children.

    Args:
        stacks: file that is made, and gets the stacks of all threads on SIGUSR2; None: nobody will
            ask.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    if stacks is not None:
        with refusing(stacks, key="train.run_dir"):
            # Never closed, for the handler cannot open it; and other nodes must see it at once.
            options = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_SYNC
            file = os.open(stacks, options, 0o644)
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)

    def wait_for_usr1() -> None:
        if stacks is not None:  # the one thread to which the system can deliver it
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
        signal.sigwait({signal.SIGUSR1})
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()

    threading.Thread(target=wait_for_usr1, name="signals", daemon=True).start()


def forget_hook(env: MutableMapping[str, str]) -> None:
    """Have the ranks meet at a port that is free, wherever they run.

    A hook of enroot's gives containers with PyTorch in them torchrun's variables, with a port that
    follows from the job's number alone: not every attempt, nor every job on the node, finds it
    free. Of these variables srun itself sets none.
    """
    if "RANK" in env:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            env.pop(name, None)


# ---- engines


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


def offer(run_dir: Path) -> int:
    """Start this node's engines, and keep the rendezvous true until SIGUSR1 or SIGTERM.

    Returns:
        0 after a signal; 1 where no engine can be kept alive.

    Raises:
        ConfigError: nothing was submitted there, or the engines cannot be started.
    """
    from qurl_megatron.fleet.process import stop
    from qurl_megatron.kit.place import address_for_others

    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    stop_on_usr1()
    config, cluster = folder.recipe(run_dir), folder.cluster(run_dir)
    count = lay_out(config.parallel, config.rollout, cluster.node).engines
    node, host = own_name(), address_for_others(one_node=False)
    rendezvous = Path(config.rollout.rendezvous)
    engines = _engines(config, run_dir / "logs" / node, count, host, rendezvous)
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
    from qurl_megatron.engines.starting import Start
    from qurl_megatron.fleet.process import EngineProcess

    settings = replace(
        config.rollout, engines=count, engine_host=host, engine_first_gpu=0, rendezvous=""
    )
    logs.mkdir(parents=True, exist_ok=True)
    start = Start(
        config=settings,
        model_dir=Path(config.model.path),
        folder=logs,
        scheme=config.quant.scheme,
        dtype=config.model.dtype,
        api_key=(rendezvous / KEY).read_text(encoding="utf-8").strip(),
    )
    return [EngineProcess(name, launch, logs) for name, launch in start.launches().items()]


def own_name() -> str:
    """Return Slurm's name of this node."""
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())
