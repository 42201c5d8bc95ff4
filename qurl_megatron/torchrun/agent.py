"""torchrun on one node, for one attempt: what starts the ranks there, as ``srun`` does in a job.

It restarts nothing: what follows an attempt is decided elsewhere. What it says of its ranks'
ends stays in its log, and is read from there.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from qurl_megatron.observe.failures import FOLDER
from qurl_megatron.runtime.filesystem import refusing
from qurl_megatron.runtime.undertaker import bury, spare
from qurl_megatron.torchrun.board import Order

SAID = 500
"""Characters of torchrun's last line that are passed on."""
END_S = 10.0
"""For a killed process to end: the disk may hold it up."""


class Torchrun:
    """A running torchrun, which ends with this process."""

    def __init__(self, order: Order, seat: int, per_node: int) -> None:
        """
        Raises:
            ConfigError: its log cannot be written.
        """
        # Not *.log: what torchrun says of a failed rank is not the cause of anything.
        self._words = Path(order.logs) / f"torchrun-{seat}.txt"
        with refusing(self._words, key="train.run_dir"), self._words.open("w") as words:
            self._process = subprocess.Popen(
                command(order, seat, per_node),
                env={**os.environ, **environment(order, per_node)},
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must not reach it: it would not wait for a save
            )
        bury(self._process.pid)

    def code(self) -> int | None:
        """Its exit code; None: it still runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def failed(self) -> dict[str, int]:
        """Exit codes of ranks that failed, by rank, once it has ended."""
        return failures(self._words.read_text(encoding="utf-8", errors="replace"))

    def last_words(self) -> str:
        lines = self._words.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return last[:SAID]

    def signal(self, number: int) -> bool:
        """Send a signal to the ranks.

        Returns:
            There are some: torchrun takes seconds to start them.
        """
        ranks = self._ranks()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
        return bool(ranks)

    def end(self) -> None:
        """Kill it and the ranks, stopped ones too."""
        self._process.send_signal(signal.SIGSTOP)  # it starts no further rank meanwhile
        self.signal(signal.SIGKILL)
        self._process.kill()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # stuck in the kernel; it ends as soon as it leaves that
            return
        self.bury()

    def bury(self) -> None:
        """It has ended: its number may become somebody else's."""
        spare(self._process.pid)

    def _ranks(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children()
        return []


def command(order: Order, seat: int, per_node: int) -> list[str]:
    """The command line of torchrun on one node."""
    options = {
        "nnodes": len(order.seats),
        "node-rank": seat,
        "nproc-per-node": per_node,
        "rdzv-id": f"attempt-{order.number}",
        "master-addr": order.address,
        "master-port": order.port,
        "max-restarts": 0,
    }
    said = [f"--{name}={value}" for name, value in options.items()]
    rank = ["-m", "qurl_megatron.torchrun.seat", order.run_dir]
    return [sys.executable, "-m", "torch.distributed.run", *said, *rank]


def environment(order: Order, per_node: int) -> dict[str, str]:
    """What torchrun and its ranks find in the environment beside what is there."""
    cores = max(1, len(os.sched_getaffinity(0)) // per_node)
    made = {
        FOLDER: order.logs,
        # Megatron warns of every optional package it does not find; `qurl show --env` says it once.
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": str(cores),  # as `qurl train` has it; torchrun would make it one
    }
    if len(order.seats) == 1:
        made["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo looks the host's name up, which may fail
    return made | {name: os.environ[name] for name in made if name != FOLDER and name in os.environ}


def failures(words: str) -> dict[str, int]:
    """Exit codes by rank in what torchrun says at its end; 128 + n for one that signal n ended.

    Ranks that torchrun has ended itself, because of another's failure, are left out.
    """
    root = words.rpartition("Root Cause (first observed failure)")[2]
    killed_by_it = "forcefully exiting via" in words
    found: dict[str, int] = {}
    for text in (root, words):  # the first comes first
        for rank, code in re.findall(r"^  rank +: (\d+) .*\n  exitcode +: (-?\d+)", text, re.M):
            number = int(code)
            its_own = number == -signal.SIGTERM or (number == -signal.SIGKILL and killed_by_it)
            if text is root or not its_own:
                found.setdefault(rank, number if number >= 0 else 128 - number)
    return found
