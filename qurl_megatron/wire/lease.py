"""An engine belongs to one run: it keeps a lease, which the run that adopted it renews.

The engine itself decides, by a monotonic clock, so only one of two runs that ask at once gets it. A
run that ends gives its lease back; a killed run's lease lapses after half a minute. A run that asks
meanwhile cannot tell a dead run from a living one. It waits for the lease to lapse, and is refused
as soon as the lease is renewed instead. Started again in its folder, a run is the same run and gets
its engines at once.

The engine's answer describes its model's computation, for the run to compare: weights may fit the
shapes of a different model too. Engines that a run starts itself need no lease: they have a key
that nobody else knows.

In engines, the names of a run's versions carry its token: "12@9f86d081", and in the middle of an
update "updating-12@9f86d081". A run keeps its token when it is started again in its folder, and no
other run has it. So an answer from another run's weights can be recognized.
"""

import hashlib
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.record import Malformed, Record, Seconds, convert, shortened

ENDPOINT = "/qurl_lease"
OWNER = ".owner"  # in a run's folder: source of its token
UNKNOWN_VERSION = -1  # weights that an engine started with: their name is no run's
MIXED = -2  # weights in the middle of an update
_NAME = re.compile(r"(updating-)?([0-9]{1,15})(?:@([0-9a-f]{1,64}))?")


@dataclass(frozen=True)
class Owner:
    """A run, to its engines."""

    token: str  # hexadecimal; of no other run
    label: str  # where a person finds it

    @staticmethod
    def of(run_dir: Path) -> "Owner":
        """Return the run of a folder; a copy of the folder is another run.

        Raises:
            ConfigError: nothing can be written there.
        """
        file, folder = run_dir / OWNER, str(run_dir.resolve())
        try:
            secret = ""
            if file.exists():
                secret = file.read_text(encoding="ascii", errors="replace")
            if not secret:
                secret = secrets.token_hex(16)
                write_whole(file, secret, private=True)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read or written: {error.strerror}") from None
        return Owner(_digest(f"{secret}{folder}"), f"{folder} on {socket.gethostname()}")

    @staticmethod
    def nobody_else() -> "Owner":
        """Return a new run without a folder."""
        return Owner(_digest(secrets.token_hex(16)), f"a process on {socket.gethostname()}")


def _digest(text: str) -> str:
    return hashlib.blake2b(os.fsencode(text), digest_size=6).hexdigest()


class LeaseVerdict(Record, frozen=True):
    """An engine's answer to a run that wants it."""

    granted: bool
    label: str  # of the run that has the lease
    left_s: Seconds  # until it lapses, unless it is renewed
    computes: dict[str, Any] | None = None  # ``tensors.arch.facts_of`` its model, if it says

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "label", shortened(self.label))


class LeaseRequest(Record, frozen=True):
    """A run's request for an engine for some seconds; 0 gives it back."""

    run: Annotated[str, Meta(min_length=1)]
    label: str
    seconds: Annotated[float, Meta(ge=0, le=3600)]
    take_over: bool = False


class Lease:
    """The engine's end. Its methods may be called from any thread."""

    def __init__(
        self, computes: dict[str, Any] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            computes: ``tensors.arch.facts_of`` the engine's model; None: it cannot say.
        """
        self._computes, self._clock, self._lock = computes, clock, threading.Lock()
        self._run, self._label, self._until = "", "", 0.0

    def ask(self, body: Any) -> dict[str, Any]:
        """Answer a ``LeaseRequest`` with the fields of a ``LeaseVerdict``.

        Raises:
            ConfigError: the request is malformed.
        """
        try:
            request = convert(LeaseRequest, body)
        except Malformed as error:
            raise ConfigError(
                f"a lease needs run and label, and seconds from 0 to 3600: {error}"
            ) from None
        with self._lock:
            now = self._clock()
            free = now >= self._until or self._run == request.run
            if free or request.take_over:
                self._run, self._label = request.run, shortened(request.label)
                self._until = now + request.seconds
            return {
                "granted": self._run == request.run,
                "label": self._label,
                "left_s": max(0.0, self._until - now),
                "computes": self._computes,
            }


@dataclass(frozen=True)
class Names:
    """The names of one run's versions."""

    token: str  # hexadecimal; "": of any run, for a reader that publishes nothing

    def of(self, version: int) -> str:
        return f"{version}@{self.token}"

    def updating(self, version: int) -> str:
        """Return the name while weights are of two versions."""
        return f"updating-{self.of(version)}"

    def number(self, name: object) -> int | None:
        """Return the version that a name stands for.

        UNKNOWN_VERSION: the name is no run's. MIXED: an update is under way. None: it is another
        run's.
        """
        match = isinstance(name, str) and _NAME.fullmatch(name)
        if not match:
            return UNKNOWN_VERSION
        updating, number, token = match.groups()
        if self.token and not token:
            return UNKNOWN_VERSION
        if self.token and token != self.token:
            return None
        return MIXED if updating else int(number)
