"""The ways a bucket's bytes take from a training rank to an engine rank; one file, both ends each.

    files    safetensors on a shared filesystem: the newest versions stay
    memory   two buckets of memory that both processes map: one machine
    group    point to point over gloo or NCCL: several machines, nothing but the network

A sender lives in a training rank, a receiver in an engine rank. Neither knows Megatron or SGLang.

One publication, for every kind alike (``L`` on the leading rank alone, the rest on all)::

    begin(version)
    connect(engines)            while L calls every engine with "connect"
    room(i, size)               where the parts of bucket i may be made
    put(i, parts)  gather blobs, L starts one call per engine with them   deliver(i)
    ...                         the ranks make bucket i + 1 meanwhile
    settle()                    L awaits the calls
    seal(manifest)              L, where what was put lasts
    receipts(session, ranks)    L, after "check"
    finish(keep=...)

An engine that fails is dropped, by ``connect``, ``deliver`` or ``settle`` themselves or by ``drop``
when the lead learned of it otherwise; the way to the others stays open.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from qurl_megatron.tensors.slice import Shard
from qurl_megatron.wire.manifest import Manifest
from qurl_megatron.wire.message import Blob, Receipt

Rank = tuple[int, int]
"""An engine's TP size and a rank in it. All engines of one size need the same cuts."""

Failures = dict[str, str]
"""Engine -> why it has no part in this publication any more."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """What a training rank knows where it opens its end; the settings are ``sync``'s."""

    rank: int
    size: int  # training ranks
    leads: bool
    device: torch.device  # where the weights are
    name: str  # of this rank, for files
    run_dir: Path
    token: str  # names what the run shares with its engines; no other run has it
    one_machine: bool  # all ranks, and engines that the run starts itself
    bytes: int  # that the versions which are kept have at most, together
    share: Callable[[Any], Any]
    """Return the leading rank's value on every rank; all call it together."""

    shared: str  # sync.dir
    host: str  # sync.host
    receipt_wait_s: float  # sync.receipt_wait_s
    timeout_s: float  # rollout.update_timeout_s


class Sender(Protocol):
    """One training rank's end."""

    kind: str
    cut: bool  # True: each engine rank gets blobs of its own, cut to what it needs
    lasting: bool  # True: blobs stay until the next version

    def describe(self, engine: str) -> dict[str, Any]:
        """``Message.transport``: what a receiver needs to open its end, and to leave receipts."""

    def begin(self, version: int) -> None:
        """A new version: whatever an unfinished one left is dropped."""

    def connect(self, engines: Mapping[str, int]) -> Failures:
        """Open the way to these engines, given their TP sizes, and to no others.

        What is open already stays so. All training ranks call it together with the same engines,
        while these handle "connect".
        """

    def room(self, index: int, size: int) -> Tensor | None:
        """Memory for a bucket of up to ``size`` bytes, uint8, 1-D, that ``put`` will send.

        Parts that are made there, in their order (``wire.Room``), need not be copied. None: there
        is no such memory, or not enough of it, which ``put`` will say.
        """

    def put(self, index: int, parts: Sequence[Shard], *, to: Rank | None = None) -> Blob:
        """Copy a bucket's parts to where engines can fetch them.

        Args:
            index: number of the bucket in this version. The bytes of bucket ``index - 2`` may be
                overwritten: engines are done with it.
            to: the engine rank they are for, where ``cut``.

        Raises:
            ConfigError: no room, or no right to write; names the path and the fix.
        """

    def deliver(self, index: int) -> None:
        """Start sending the bucket ``index``; returns at once."""

    def settle(self) -> Failures:
        """Wait for all that was delivered; the engines dropped since ``connect``."""

    def drop(self, engine: str) -> None:
        """Send this engine nothing more, and wait for it no longer."""

    def seal(self, manifest: Manifest) -> None:
        """On the leading rank, once all is put: what ``lasting`` buckets make is a version now.

        Raises:
            ConfigError: no room, or no right to write.
        """

    def receipts(self, session: str, ranks: int) -> list[Receipt]:
        """What the engine ranks left at "check"; a missing one is an error in its place."""

    def finish(self, *, keep: int) -> None:
        """The version is with the engines; older than the ``keep`` newest are deleted."""

    def close(self) -> None:
        """Remove everything that this end made."""


class Receiver(Protocol):
    """One engine rank's end, opened from ``Message.transport``; one session comes after another."""

    def follow(self, transport: dict[str, Any]) -> bool:
        """Begin the next session; False where ``transport`` needs another end.

        Raises:
            ConfigError: it needs this end, and the sender cannot be reached.
        """

    def fetch(self, blob: Blob) -> Tensor:
        """The blob's bytes, uint8 [blob.bytes], valid until the next fetch.

        Raises:
            ConfigError: not there, too short, or not to be trusted; names it.
        """

    def report(self, receipt: Receipt) -> None:
        """Leave a receipt where the sender looks for it.

        Raises:
            ConfigError: it cannot be left there.
        """

    def close(self) -> None: ...


class AtOnce:
    """The part of a sender that has nothing to do where engines find the bytes by themselves."""

    def connect(self, engines: Mapping[str, int]) -> Failures:
        return {}

    def room(self, index: int, size: int) -> Tensor | None:
        return None

    def deliver(self, index: int) -> None:
        pass

    def settle(self) -> Failures:
        return {}

    def seal(self, manifest: Manifest) -> None:
        pass

    def drop(self, engine: str) -> None:
        pass
