"""Engines that were not started here: those that a rendezvous offers, and the leases on them.

A rendezvous is a folder with one JSON file per engine:

    {"url": "http://10.0.0.7:30000", "api_key_file": "key"}

An engine whose file appears joins the fleet, and one whose file is gone leaves it. Key files lie in
the same folder; only the user needs to be able to read them.

An adopted engine belongs to one run, by a lease that is renewed even during long publications. Per
URL there is one lease request at a time. Otherwise a renewal under way could take an engine again
that has just been given back.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from qurl_megatron.fleet.client import EngineClient, EngineError, in_parallel
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.record import Malformed, decode
from qurl_megatron.wire.lease import Owner

LEASE_S = 30.0
RENEW_S = 10.0
ANSWER_S = 5.0  # for the answer to a lease request, which no generation holds up


class Member(msgspec.Struct, frozen=True):
    """An entry of the rendezvous."""

    url: Annotated[str, Meta(pattern="^https?://")]
    api_key_file: str | None = None

    def api_key(self, rendezvous: Path) -> str | None:
        """Return the engine's key; raise ``ConfigError`` if its file cannot be read."""
        if self.api_key_file is None:
            return None
        try:
            return (rendezvous / self.api_key_file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:  # ValueError: not text, or not a file's name
            raise ConfigError(f"the API key of {self.url} cannot be read: {error}") from None


def read_members(rendezvous: Path, wrong: Callable[[ConfigError], None]) -> dict[str, Member]:
    """Return the engines offered now, by URL; none if the folder does not exist yet.

    Args:
        wrong: called with an error for each entry that is malformed or cannot be read. It may be
            half written: read again before believing it.
    """
    members = {}
    for file in sorted(rendezvous.glob("*.json")):
        try:
            if text := file.read_text(encoding="utf-8").strip():
                member = decode(Member, text)
                members[member.url.rstrip("/")] = member
        except FileNotFoundError:  # its engine has just left
            continue
        except Malformed as error:
            form = '{"url": ..., "api_key_file": ...}'
            wrong(ConfigError(f"rendezvous {file} is not {form}: {error}"))
        except (OSError, UnicodeDecodeError) as error:
            wrong(ConfigError(f"rendezvous {file} cannot be read: {error}"))
    return members


@dataclass(eq=False)
class _Tenure:
    """This run's hold on one URL."""

    asking: threading.Lock = field(default_factory=threading.Lock)
    holder: EngineClient | None = None
    """Client of the engine that this run has a lease on. An engine that leaves and returns has a
    new client; the lease is then the new client's, and the old one must not give it back."""
    left_s: float | None = None  # that another run's lease had left when it was last asked for


class Leases:
    """The leases of one run; thread-safe."""

    def __init__(
        self,
        owner: Owner,
        *,
        take_over: bool,
        lost: Callable[[EngineClient, str], None],
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            lost: called with an engine that another run has taken over, and a sentence.
        """
        self._owner, self._take_over, self._lost, self._clock = owner, take_over, lost, clock
        self._tenures: dict[str, _Tenure] = {}
        self._due, self._ended = 0.0, False

    def claim(self, client: EngineClient, needed: Callable[[], bool]) -> Mapping[str, Any] | None:
        """Lease an engine for this run.

        Returns:
            Facts of its model's computation, if it reports them.

        Raises:
            EngineError: no answer, or another run's lease may still lapse: ask again.
            ConfigError: it belongs to another run, which is alive.
        """
        tenure = self._tenures.setdefault(client.url, _Tenure())
        with tenure.asking:
            if self._ended or not needed():
                raise EngineError(f"{client.url} is not wanted any more")
            verdict = client.lease(
                self._owner, LEASE_S, take_over=self._take_over, timeout_s=ANSWER_S
            )
            if verdict is None:
                return None
            before, tenure.left_s = tenure.left_s, None
            if verdict.granted:
                tenure.holder = client
                return verdict.computes
            if before is not None and verdict.left_s > before:
                raise ConfigError(
                    f"{client.url} belongs to a run that is at work ({verdict.label}); give this "
                    "run engines of its own, stop that one, or set rollout.take_over=true"
                )
            tenure.left_s = verdict.left_s
        raise EngineError(
            f"{client.url} belongs to {verdict.label} for {verdict.left_s:.0f} s more, unless that "
            "run renews its lease"
        )

    def renew(self) -> None:
        """Renew all leases if they are due, without waiting for the answers."""
        if self._clock() < self._due:
            return
        self._due = self._clock() + RENEW_S
        for tenure in list(self._tenures.values()):
            threading.Thread(target=self._renew, args=(tenure,), daemon=True).start()

    def _renew(self, tenure: _Tenure) -> None:
        with tenure.asking, suppress(EngineError):  # health checks notice a silent engine
            client = tenure.holder
            if client is None:
                return
            verdict = client.lease(self._owner, LEASE_S, timeout_s=ANSWER_S)
            if verdict is not None and not verdict.granted:
                tenure.holder = None
                reason = f"{client.url} was taken over by another run ({verdict.label})"
                self._lost(client, reason)

    def let_go(self, client: EngineClient) -> None:
        """Give back the lease on an engine that has left, without waiting for the answer."""
        if tenure := self._tenures.get(client.url):
            threading.Thread(target=self._give_back, args=(tenure, client), daemon=True).start()

    def end(self) -> None:
        """Give all leases back, so that the next run need not wait for them to lapse."""
        self._ended = True
        # Twice the time of an answer: each may first wait for a request under way.
        in_parallel(self._give_back, list(self._tenures.values()), 2 * ANSWER_S)

    def _give_back(self, tenure: _Tenure, client: EngineClient | None = None) -> None:
        """Give a lease back if this client holds it; None: whichever client holds it."""
        with tenure.asking, suppress(EngineError):  # a silent engine's lease lapses by itself
            holder = tenure.holder
            if holder is not None and client in (None, holder):
                tenure.holder = None
                holder.lease(self._owner, 0, timeout_s=ANSWER_S)
