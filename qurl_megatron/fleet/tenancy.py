"""Engines that were not started here: which a batch system offers, and which are this run's.

A rendezvous is a file of JSON lines, or a folder with one file per engine:

    {"url": "http://10.0.0.7:30000", "api_key_file": "key"}

Engines written there join the fleet, and engines gone from there leave it. A key file is looked up
beside the rendezvous, so that both can lie in one folder that only the user can read.

An adopted engine belongs to one run, by a lease that a thread here renews: publications take
minutes, and the supervisor waits for them. There is one lease request at a time per URL, so that an
engine given back is not granted again by a request under way. An engine that leaves and returns is
another one to the fleet, at the same URL: a lease that the first still has to give back is the
second's.
"""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from qurl_megatron.fleet.client import EngineClient, EngineError
from qurl_megatron.fleet.roster import EngineRecord, Roster
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.record import Malformed, decode
from qurl_megatron.wire.lease import Owner

LEASE_S = 30.0
RENEW_S = 5.0
ANSWER_S = 5.0  # for an engine to answer, which it does without a look at its requests


@dataclass(frozen=True)
class Member:
    url: str
    api_key_file: Path | None
    place: str = ""  # file, or file and line, of its entry

    def api_key(self) -> str | None:
        """
        Raises:
            ConfigError: the key file cannot be read.
        """
        if self.api_key_file is None:
            return None
        try:
            return self.api_key_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:  # the latter: no text, or no name of a file
            raise ConfigError(f"the API key of {self.url} cannot be read: {error}") from None


class _Entry(msgspec.Struct, frozen=True):
    url: Annotated[str, Meta(pattern="^https?://")]
    api_key_file: str | None = None


class WrongEntry(ConfigError):
    """An entry that is malformed or cannot be read; whose it was is not known."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


def read_members(rendezvous: Path, wrong: Callable[[WrongEntry], None]) -> dict[str, Member]:
    """Return the engines offered now, by URL; none where there is nothing yet.

    Args:
        wrong: gets an error for each bad entry. (A writer may be in the middle of it: ask again
            before believing it.)

    Raises:
        ConfigError: a file of JSON lines cannot be read.
    """
    entries: list[tuple[str, str]] = []  # place and text
    if rendezvous.is_dir():
        folder = rendezvous
        for file in sorted(rendezvous.glob("*.json")):
            try:
                if (text := _text(file)) is not None:
                    entries.append((str(file), text))
            except WrongEntry as error:
                wrong(error)
    else:
        folder = rendezvous.parent
        for number, line in enumerate((_text(rendezvous) or "").splitlines(), start=1):
            if line.strip():
                entries.append((f"{rendezvous}, line {number}", line))
    members = {}
    for place, text in entries:
        try:
            entry = decode(_Entry, text)
        except Malformed as error:
            form = '{"url": ..., "api_key_file": ...}'
            wrong(WrongEntry(f"rendezvous {place} is not {form}: {error}", place))
            continue
        url, key_file = entry.url.rstrip("/"), entry.api_key_file
        members[url] = Member(url, folder / key_file if key_file else None, place)
    return members


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:  # not written yet, or its engine has just left
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise WrongEntry(f"rendezvous {file} cannot be read: {error}", str(file)) from None


class Tenancy:
    """The leases of one fleet; it reports to the fleet who holds an engine."""

    def __init__(self, roster: Roster, owner: Owner) -> None:
        self._roster, self._owner = roster, owner
        self._locks: dict[str, threading.Lock] = {}  # of each URL, held while it is asked
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tenancy", daemon=True)

    def claim(self, engine: EngineRecord, client: EngineClient) -> None:
        """Make an adopted engine this run's; one whose run lives leaves the fleet.

        Raises:
            EngineError: it did not say, or its lease may still lapse: ask again.
        """
        roster = self._roster
        if roster.fixed or engine.process is not None or engine.ours:
            return
        take_over = roster.config.take_over
        with self._asking(engine):
            if self._stopping.is_set() or engine.state == "gone":
                raise EngineError(f"{engine.url} is not wanted any more")
            verdict = client.lease(self._owner, LEASE_S, take_over=take_over, timeout_s=ANSWER_S)
            if verdict is None or verdict.granted:
                engine.ours = verdict is not None
        if verdict is None or verdict.granted:
            if verdict and (differing := roster.other_facts(verdict.computes)):
                roster.leave(
                    engine,
                    "gave up",
                    f"{engine.url} computes another model than this run trains: {differing}; start "
                    "it on a folder with this run's config.json and generation_config.json",
                )
            return
        before, engine.leased_s = engine.leased_s, verdict.left_s
        if before is None or verdict.left_s <= before:
            raise EngineError(
                f"{engine.url} belongs to {verdict.label} for {verdict.left_s:.0f} s more, unless "
                "that run renews its lease"
            )
        roster.leave(
            engine,
            "gave up",
            f"{engine.url} belongs to a run that is at work ({verdict.label}); give this run "
            "engines of its own, stop that one, or set rollout.take_over=true",
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Give the engines back, so that the next run need not wait for leases to lapse."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._each(self._give_back, self._roster.adopted)

    def let_go(self, engine: EngineRecord) -> None:
        """Give one back that has left the fleet, without waiting for its answer."""
        threading.Thread(target=self._give_back, args=(engine,), daemon=True).start()

    def _run(self) -> None:
        while not self._stopping.wait(RENEW_S):
            self._each(self._renew, [engine for engine in self._roster.engines() if engine.ours])

    def _renew(self, engine: EngineRecord) -> None:
        with self._asking(engine), suppress(EngineError):  # silent: health checks notice
            if not engine.ours:
                return
            verdict = engine.api.lease(self._owner, LEASE_S, timeout_s=ANSWER_S)
            if verdict is not None and not verdict.granted:
                engine.ours = False
                reason = f"{engine.url} was taken over by another run ({verdict.label})"
                self._roster.leave(engine, "gave up", reason)

    def _give_back(self, engine: EngineRecord) -> None:
        with self._asking(engine), suppress(EngineError):  # silent, or gone: its lease will end
            if not engine.ours:
                return
            engine.ours = False
            if not any(other.ours and other.url == engine.url for other in self._roster.adopted):
                engine.api.lease(self._owner, 0, timeout_s=ANSWER_S)

    def _asking(self, engine: EngineRecord) -> threading.Lock:
        return self._locks.setdefault(engine.url, threading.Lock())

    @staticmethod
    def _each(act: Callable[[EngineRecord], None], engines: Iterable[EngineRecord]) -> None:
        """``act`` on all at once; returns when it is done, or has had its time."""
        threads = [threading.Thread(target=act, args=(engine,), daemon=True) for engine in engines]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 2 * ANSWER_S  # one of them may wait for a request under way
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
