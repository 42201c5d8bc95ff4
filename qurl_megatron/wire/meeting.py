"""Before every version all ends of a link meet: who is there, of what, and does the link still do?

Each end, training ranks and engine ranks alike, leaves one line in a store and reads everybody's.
So all come to one conclusion, and nobody decides for the others: a link that every end holds, and
over which as much has come as was sent, stays open; otherwise all open the same new one. It may
have been dropped at one end alone, the engine may be another process under its old name, and what
an abandoned version left in a link must never be taken for the next one's.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from qurl_megatron.wire import schema
from qurl_megatron.wire.facts import disagreement

POLL_S = 0.001
KEPT = 2  # meetings whose lines stay in the store: a late end may still read the one before


class LinkError(RuntimeError):
    """A link cannot be opened or used, and why; a RuntimeError as all of torch's are."""


@dataclass(frozen=True)
class Hello:
    """One end's line."""

    link: str  # that it holds; "": none
    moved: tuple[int, ...]  # messages sent to (come from) each rank of the other side over it
    facts: dict[str, str]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "Hello":
        """
        Raises:
            LinkError: it is of another version of this package.
        """
        try:
            raw = schema.fields(schema.parse(text), _HELLO)
        except schema.Malformed as error:
            raise LinkError(f"an end of the link sent a malformed line: {error}") from None
        return Hello(raw["link"], tuple(raw["moved"]), raw["facts"])


_HELLO: dict[str, schema.Range] = {
    "link": schema.text,
    "moved": schema.list_of(schema.count),
    "facts": schema.map_of(schema.text),
}


@dataclass(frozen=True)
class Meeting:
    """Where the ends of one link meet for one version."""

    store: dist.Store
    name: str  # of the link
    number: int  # of the version; every end counts alike
    senders: int

    def announce(self, tp: int) -> None:
        """By the leading training rank: how many the engine's ranks are."""
        self.store.set(self._key("size"), str(tp))

    def size(self) -> int:
        """The engine's ranks; waits, as long as the store does.

        Raises:
            RuntimeError: the trainer did not say.
        """
        return int(self.store.get(self._key("size")))

    def attend(self, rank: int, tp: int, hello: Hello, timeout_s: float) -> list[Hello]:
        """Everybody's lines, by rank: training ranks first, then the engine's.

        Raises:
            LinkError: somebody did not come in time; names them.
        """
        self.store.set(self._key(rank), hello.to_json())
        old = self.number - KEPT - 1
        self.store.delete_key(self._key(rank, old))
        if rank == 0:
            self.store.delete_key(self._key("size", old))
        keys = [self._key(each) for each in range(self.senders + tp)]
        try:
            self.store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            late = [self.who(each) for each, key in enumerate(keys) if not self.store.check([key])]
            raise LinkError(f"{', '.join(late)} did not come" if late else str(error)) from None
        return [Hello.from_json(text) for text in self.store.multi_get(keys)]

    def who(self, rank: int) -> str:
        if rank < self.senders:
            return f"training rank {rank}"
        return f"engine rank {rank - self.senders}"

    def refusal(self, kind: str, hellos: Sequence[Hello]) -> str | None:
        """Why these ends cannot be joined; None: they can."""
        lead = hellos[0].facts
        disagreements = (disagreement(kind, lead, hello.facts) for hello in hellos[1:])
        return next(filter(None, disagreements), None)

    def _key(self, what: int | str, number: int | None = None) -> str:
        return f"meeting/{self.number if number is None else number}/{self.name}/{what}"


def still_open(hellos: Sequence[Hello], senders: int) -> bool:
    """True where all hold the same link, and all that was sent over it has come."""
    links = {hello.link for hello in hellos}
    if len(links) > 1 or "" in links:
        return False
    return all(
        hellos[source].moved[rank] == hellos[senders + rank].moved[source]
        for source in range(senders)
        for rank in range(len(hellos) - senders)
    )


def patient(store: dist.Store, key: str, deadline: float) -> bool:
    """True once the key is there; False where it is not by then."""
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
