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
from qurl_megatron.wire.files import FilesSender, leave
from qurl_megatron.wire.lease import Names
from qurl_megatron.wire.message import Blob, Receipt, message_in
from tests.support.fake_engine import FakeEngine, token_at
from tests.support.versions import read_version
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
                update.bucket(lambda engine, rank, blob=blob: [blob])
            update.commit(sender.receipts)
    finally:
        sender.close()


class KeepsVersions:
    """Stands for a fleet of one engine, which takes everything in and keeps versions that come as
    files, each whole in a file of torch's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names, self.lock = folder, Names(""), threading.Lock()
        self._engine = EngineRecord("engine-0", client=_Notes())

    @contextmanager
    def publication(self) -> Iterator[list[EngineRecord]]:
        yield [self._engine]

    def each(self, act: Callable, purpose: str, engines: Iterable[EngineRecord]) -> dict:
        return {engine: act(engine) for engine in engines}

    def confirm(self, engines: Collection[EngineRecord], version: int) -> None:
        assert list(engines) == [self._engine]
        if blobs := self._engine.client.take_blobs():
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save(read_version(blobs), self.folder / f"{version}.pt")


class _Notes:
    """A client whose engine says yes to everything."""

    url = "http://nowhere"

    def __init__(self) -> None:
        self.version, self._blobs = "", []

    def take_blobs(self) -> list[Blob]:
        blobs, self._blobs = self._blobs, []
        return blobs

    def __getattr__(self, name: str) -> Callable:
        assert name in ("pause", "begin_weight_update", "end_weight_update", "flush", "resume")
        return lambda *_: None

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def weight_version(self) -> str:
        return self.version

    def update_weights_from_tensor(self, serialized: Sequence[str], load_format: str) -> None:
        [message] = map(message_in, serialized)
        if message.transport["kind"] == "files":
            self._blobs += message.blobs
        if message.action in ("check", "finish"):
            whole = Receipt(message.session, 0, None, 0, 0.0)
            leave(Path(message.transport["receipts"]), whole)
