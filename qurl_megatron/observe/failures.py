"""The reason for a rank's failure, kept for an operator's tools: ``failure-RANK.json``.

Logs have only the message of the rank that spoke first. So each rank of a job leaves its exception
in the folder of its attempt, with its place in the run, to tell the cause from its consequences.
"""

import contextlib
import json
import os
import socket
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from qurl_megatron.kit.clock import now
from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.record import Malformed, decode

FOLDER = "QURL_ATTEMPT"
"""Environment variable that names the attempt's folder; without it nothing is kept."""


@dataclass
class Whereabouts:
    phase: str = "setting up"
    step: int | None = None  # that is being done
    version: int | None = None  # of the weights that engines hold

    def enter(self, phase: str) -> None:
        self.phase = phase

    @contextlib.contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Set the phase inside the block; after an exception it stays, for the report."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before


HERE = Whereabouts()
"""The place of this process, which is one rank of one run."""


@dataclass(frozen=True)
class Failure:
    """failure-RANK.json."""

    time: float  # Unix seconds, by the node's clock
    rank: int
    node: str
    phase: str
    step: int | None
    version: int | None
    kind: str  # name of the exception's type
    text: str
    traceback: str


def keep(error: BaseException, env: Mapping[str, str] = os.environ) -> None:
    """Write ``failure-RANK.json`` to the attempt's folder; outside of an attempt do nothing."""
    if not env.get(FOLDER):
        return
    rank = int(env.get("RANK") or env.get("SLURM_PROCID") or 0)
    failure = Failure(
        time=now(),
        rank=rank,
        node=env.get("SLURMD_NODENAME") or socket.gethostname(),
        **vars(HERE),
        kind=type(error).__name__,
        text=str(error),
        traceback="".join(traceback.format_exception(error)),
    )
    path = Path(env[FOLDER]) / f"failure-{rank}.json"
    # On a disk that is full, the error itself must still be reported, and the log has it.
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps(asdict(failure), indent=1) + "\n")


def read_failures(folder: Path) -> list[Failure]:
    """Return an attempt's failures, the earliest first; leave damaged ones out, as logs remain."""
    failures = []
    for path in folder.glob("failure-*.json"):
        with contextlib.suppress(Malformed):
            failures.append(decode(Failure, path.read_bytes()))
    return sorted(failures, key=lambda failure: failure.time)
