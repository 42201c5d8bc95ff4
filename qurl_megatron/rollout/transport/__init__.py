"""The ways a bucket's bytes take from a training rank to an engine rank; one file, both ends each.

    files    safetensors on a shared filesystem: versions persist
    memory   two buckets of memory that both processes map: one machine
    group    point to point over gloo or NCCL: several machines, nothing but the network

A sender lives in a training rank, a receiver in an engine rank. Neither knows Megatron or SGLang.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from qurl_megatron.rollout.wire import Blob, Receipt

Part = tuple[str, Tensor, int | None, int]
"""(Hugging Face name, this rank's slice, split dimension, first row or column along it)."""


class Sender(Protocol):
    """One training rank's end."""

    kind: str
    cut: bool  # True: each engine rank gets blobs of its own, cut to what it needs

    def describe(self) -> dict[str, Any]:
        """``Message.transport``: what a receiver needs to open its end, and to leave receipts."""

    def begin(self, version: int) -> None:
        """A new version: whatever an unfinished one left is dropped."""

    def put(self, index: int, parts: Sequence[Part], *, to: str = "") -> Blob:
        """Copy a bucket's parts to where engines can fetch them.

        Args:
            index: number of the bucket in this version. The bytes of bucket ``index - 2`` may be
                overwritten: engines are done with it.
            to: the engine rank they are for, where ``cut``.

        Raises:
            ConfigError: no room, or no right to write; names the path and the mend.
        """

    def receipts(self, session: str, ranks: int) -> list[Receipt]:
        """What the engine ranks left after "check"; a missing one is an error in its place."""

    def finish(self, *, keep: int) -> None:
        """The version is with the engines; older than the ``keep`` newest are deleted."""

    def close(self) -> None:
        """Remove what this end made."""


class Receiver(Protocol):
    """One engine rank's end, opened from ``Message.transport``."""

    def fetch(self, blob: Blob) -> Tensor:
        """The blob's bytes, uint8 [blob.bytes], valid until the next fetch.

        Raises:
            ConfigError: not there, too short, or not to be trusted; names it.
        """

    def report(self, receipt: Receipt) -> None:
        """Leave a receipt where the sender looks for it."""

    def close(self) -> None: ...
