"""A new version for the engines of a fleet, from a test instead of a trainer."""

import inspect
import secrets
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from qurl_megatron.config import SyncConfig
from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.fleet.fleet import EngineRecord, Fleet
from qurl_megatron.publish.update import Update
from qurl_megatron.tensors.arch import StopIds
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.wire.files import FilesSender
from qurl_megatron.wire.lease import Names
from qurl_megatron.wire.message import Piece, Receipt, checksum, encoded, message_in, piece_of, raw
from qurl_megatron.wire.session import open_receiver
from qurl_megatron.wire.transport import Receiver
from tests.support.fake_engine import FakeEngine, token_at
from tests.support.versions import joined
from tests.support.waiting import PATIENCE_S

OF_FLEET = inspect.signature(Fleet).parameters.keys()


def publish(
    fleet: Fleet, version: int, *, places: str = "", committing: Callable[[str], object] = str
) -> None:
    """To engines without weights: nothing is sent, and each rank has all of it.

    Args:
        places: where the parameters of each lie.
        committing: called with a session's name before its receipts are read.
    """

    def receipts(session: str, ranks: int) -> list[Receipt]:
        committing(session)
        return [Receipt(session, rank, None, 0, 0.0, places) for rank in range(ranks)]

    with (
        fleet.publication() as engines,
        Update(fleet, engines, version, SyncConfig(), lambda engine, ranks: {}) as update,
    ):
        update.connect()
        update.commit(receipts)


def adopting(*engines, **options) -> Fleet:
    """A fleet that is to adopt the engines, with options of ``rollout`` and of ``Fleet``."""
    settings = {"samples_per_prompt": 2, "max_new_tokens": 6, "health_every_s": 0.1}
    settings |= {"health_timeout_s": PATIENCE_S, "urls": tuple(engine.url for engine in engines)}
    others = {"model_dir": "unused", "scheme": "none", "log_dir": "unused", "vocabulary": 96}
    for name, value in options.items():
        (others if name in OF_FLEET else settings)[name] = value
    return Fleet(RolloutConfig(**settings), **others)


@contextmanager
def fleet_of(*engines: FakeEngine, **options):
    """A fleet that has adopted the engines, and published a version to them."""
    with ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.close)
        every = engines[0].stop_every
        ends = range(every, 51, every) if every else ()
        stops = frozenset(token_at(end - 1) for end in ends)
        fleet = stack.enter_context(adopting(*engines, stops=StopIds(stops, stops), **options))
        publish(fleet, 7)
        fleet.drain()
        for engine in engines:
            engine.calls.clear()
        yield fleet


def publish_tensors(fleet: Fleet, version: int, tensors: Mapping[str, Tensor]) -> None:
    """To embedded engines: whole tensors in two buckets, as a training rank puts them."""
    root = Path(tempfile.gettempdir()) / f"qurl-test-{secrets.token_hex(6)}"
    sender = FilesSender(root, "tp0", leads=True)
    try:
        sender.begin(version)
        with (
            fleet.publication() as engines,
            Update(fleet, engines, version, SyncConfig(), sender.describe) as update,
        ):
            names = sorted(tensors)
            for index, some in enumerate((names[::2], names[1::2])):
                blob = sender.put(index, [Shard.whole(name, tensors[name]) for name in some])
                blobs = encoded([blob])
                update.bucket(lambda engine, rank, blobs=blobs: blobs)
            update.commit(sender.receipts)
    finally:
        sender.close()


class KeepsVersions:
    """Stands for a fleet of one engine on each host, which take everything in.

    All must get the same. Versions in files, or in the CPU's memory, are kept as files of torch's.
    """

    def __init__(self, folder: Path, hosts: Sequence[str] = ("nowhere",)) -> None:
        self.folder, self.names, self.lock = folder, Names(""), threading.Lock()
        self._engines = [EngineRecord(f"on-{host}", client=_Notes(host)) for host in hosts]

    @contextmanager
    def publication(self) -> Iterator[list[EngineRecord]]:
        yield self._engines

    def each(self, act: Callable, purpose: str, engines: Iterable[EngineRecord]) -> dict:
        return {engine: act(engine) for engine in engines}

    def serve(self, failed: Callable[[str], object]) -> None:
        """Have the engines serve; ``failed`` is told why one does no longer."""
        for engine in self._engines:
            engine.state = "serving"
        self.fail = lambda engine, reason: failed(reason)

    def confirm(self, engines: Collection[EngineRecord], version: int) -> None:
        assert list(engines) == self._engines
        count = len(self._engines)
        assert [e.client.turn for e in engines] == [(place, count) for place in range(count)]
        first, *others = [engine.client.take_version() for engine in engines]
        for other in others:
            assert other.keys() == first.keys()
            assert all(torch.equal(raw(other[name]), raw(first[name])) for name in other)
        if first:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save(first, self.folder / f"{version}.pt")


class _Notes:
    """A client whose engine says yes to everything."""

    def __init__(self, host: str) -> None:
        self.url, self.version = f"http://{host}", ""
        self._pieces: list[tuple[Piece, Tensor]] = []
        self._receiver: Receiver | None = None

    def take_version(self) -> dict[str, Tensor]:
        pieces, self._pieces = self._pieces, []
        return joined(pieces)

    def __getattr__(self, name: str) -> Callable:
        assert name in ("pause", "begin_weight_update", "end_weight_update", "flush", "resume")
        return lambda *_: None

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def weight_version(self) -> str:
        return self.version

    def update_weights_from_tensor(self, serialized: Sequence[str]) -> None:
        [message] = map(message_in, serialized)
        self.turn = message.turn
        if self._receiver is None or not self._receiver.follow(message.transport):
            self._receiver = open_receiver(message.transport, 0)
        for blob in message.blobs:
            slot = blob.where.get("slot")
            if "cuda" in blob.where or (isinstance(slot, dict) and "cuda" in slot):
                continue  # a process cannot open handles of its own memory
            data = self._receiver.fetch(blob)
            for piece in blob.pieces:
                value = piece_of(data, piece).clone()
                assert checksum(value) == piece.checksum, f"{piece.name} is damaged"
                self._pieces.append((piece, value))
        if message.action in ("check", "finish"):
            self._receiver.report(Receipt(message.session, 0, None, 0, 0.0))
