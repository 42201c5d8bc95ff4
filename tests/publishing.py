"""A new version for the engines of a fleet, from a test instead of a trainer."""

import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from qurl_megatron.config import SyncConfig
from qurl_megatron.fleet.fleet import Fleet
from qurl_megatron.publish.update import Update
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.wire.files import FilesSender
from qurl_megatron.wire.message import Receipt


def publish(fleet: Fleet, version: int) -> None:
    """To engines without weights: nothing is sent, and each rank has all of it."""

    def receipts(session: str, ranks: int) -> list[Receipt]:
        return [Receipt(session, rank, None, 0, 0.0) for rank in range(ranks)]

    with (
        fleet.publication() as engines,
        Update(fleet, engines, version, SyncConfig(), lambda engine: {}) as update,
    ):
        update.connect()
        update.commit(receipts)


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
