"""The lead of one training run, without a policy: brings versions to a fleet.

As a process it publishes one version, and can be told to die in the middle of it::

    python -m tests.sglang.trainer '{"checkpoint": ..., "version": 7, "dies": true, ...}'
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors.torch import load_file

from qurl_megatron.config.sections import RolloutConfig, SyncConfig
from qurl_megatron.fleet.fleet import EngineRecord, Fleet
from qurl_megatron.publish.update import Update
from qurl_megatron.wire.files import FilesSender
from qurl_megatron.wire.lease import Owner
from qurl_megatron.wire.message import Blob, encoded
from qurl_megatron.wire.transport import Sender
from tests.sglang.engines import Tensors, shards

BUCKETS = 3
OWNER = Owner("0123456789ab", "the drills' trainer")  # the same run, however often it is started

During = Callable[[int, list[Blob]], None]
"""(bucket, every training rank's blob of it), when the buckets before it are loaded and before
this one is sent: the moment for a fault."""

Sees = Callable[[EngineRecord, int, list[Blob]], Sequence[Blob]]
"""(engine, bucket, blobs) -> those that the engine is told of."""


def publish(
    fleet: Fleet,
    tensors: Tensors,
    version: int,
    senders: Sequence[Sender],
    *,
    config: SyncConfig | None = None,
    during: During = lambda index, blobs: None,
    sees: Sees = lambda engine, index, blobs: blobs,
) -> None:
    """One version in three buckets, each of one blob per sender, to engines of one rank each.

    The largest tensor comes last.
    """
    names, lead = sorted(tensors), senders[0]
    with fleet.publication() as engines:
        for sender in senders:
            sender.begin(version)
        with Update(fleet, engines, version, config or SyncConfig(), lead.describe) as update:
            if lead.cut:
                update.connect()
                update.drop([lead.connect(update.sizes)])
            for index in range(BUCKETS):
                parts = shards(
                    {name: tensors[name] for name in names[BUCKETS - 1 - index :: BUCKETS]},
                    len(senders),
                )
                to = (1, 0) if lead.cut else None
                pairs = zip(senders, parts, strict=True)
                blobs = [sender.put(index, part, to=to) for sender, part in pairs]
                update.wait()
                during(index, blobs)
                update.bucket(lambda engine, _, i=index, b=blobs: encoded(sees(engine, i, b)))
                gone = {engine.name for engine in engines} - update.sizes.keys()
                for sender in senders:
                    for engine in gone:
                        sender.drop(engine)
                    sender.deliver(index)
            update.drop([lead.settle()])
            update.commit(lead.receipts)
        for sender in senders:
            sender.finish()


def file_senders(folder: Path) -> list[FilesSender]:
    """Of two tensor-parallel training ranks."""
    return [FilesSender(folder, f"tp{rank}", leads=rank == 0) for rank in range(2)]


def main(order: dict) -> None:
    config = RolloutConfig(backend="sglang", urls=tuple(order["urls"]))
    folder = Path(order["folder"])
    tensors = load_file(Path(order["checkpoint"]) / "model.safetensors")

    def die(index: int, blobs: list[Blob]) -> None:
        if index == 1 and order["dies"]:
            os.kill(os.getpid(), signal.SIGKILL)

    with Fleet(
        config,
        order["model"],
        scheme="int8",
        dtype="float32",
        log_dir=folder / "logs",
        vocabulary=1 << 20,
        owner=OWNER,
    ) as fleet:
        publish(fleet, tensors, order["version"], file_senders(folder / "sync"), during=die)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
