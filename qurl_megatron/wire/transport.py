"""A transport brings a bucket's bytes from a training rank to an engine rank.

    files    files on a shared filesystem, there until all engines have the version
    memory   two buckets of memory that both processes map: one machine
    group    point to point over gloo or NCCL: several machines, nothing but the network
    relay    between training ranks over gloo or NCCL, and memory on each of their machines

Each is a module with both ends, and a row of ``wire.session.TRANSPORTS``: a sender lives in a
training rank, a receiver in an engine rank. Neither knows Megatron or SGLang.

One publication, for every kind alike (``L`` on the leading rank alone, the rest on all)::

    begin(version)
    arrange(engines)            L, before it calls every engine with "connect"
    connect(engines)            meanwhile
    room(i)                     where the parts of bucket i may be made
    put(i, parts)  gather blobs, L starts one call per engine with them   deliver(i)
    ...                         the ranks make bucket i + 1 meanwhile
    settle()                    L awaits the calls
    receipts(session, ranks)    L, after "check"
    finish()

``connect``, ``deliver`` and ``settle`` drop an engine that fails there; ``drop`` is for one whose
failure the leading rank saw elsewhere. The connections to the others stay open.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from qurl_megatron.kit.record import Malformed, decode, shortened
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.wire.message import FORMAT, SAME_PACKAGE, Blob, Receipt, Turn

NCCL_SETTINGS = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
"""How NCCL allocates and multicasts; all ends of a communicator must agree. SGLang sets both to 0
unless they are set, where NCCL's own default is on."""

EQUAL = {
    "protocol": f"their messages are incompatible; {SAME_PACKAGE}",
    "nccl": "NCCL only connects equal versions; install one NCCL (nvidia-nccl) in both "
    "environments, or set sync.transport=files",
    **{
        name: "all ends of a communicator need the same value; start both with the same "
        f"{name}, or set sync.transport=files"
        for name in NCCL_SETTINGS
    },
}
"""Facts that must agree at both ends, with the reason and the fix: the protocol for every carrier,
the others only over NCCL. Files compare nothing: every message names its format."""

POLL_S = 0.001
SLOWEST_POLL_S = 1.0

Rank = tuple[int, int]
"""An engine's TP size and a rank in it. All engines of one size need the same cuts."""

Place = Rank | str | None
"""The engines that a blob is for: one engine rank (``Sender.cut``), all on one host, or all."""

Failures = dict[str, str]
"""By engine: why it no longer takes part in this publication."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Facts that a training rank has when it opens its end; the settings are ``sync``'s."""

    rank: int
    size: int  # training ranks
    leads: bool
    device: torch.device  # where the weights are
    name: str  # of this rank, for files
    run_dir: Path
    token: str  # prefix of names shared with the engines; unique to the run
    one_machine: bool  # all ranks are on it, and the engines, which the run starts itself
    hosts: Sequence[str]  # each rank's machine, as engines' addresses have it
    share: Callable[[Any], Any]
    """Return the leading rank's value on every rank; all call it together."""

    shared: str  # sync.dir
    host: str  # sync.host
    timeout_s: float  # rollout.update_timeout_s


class Sender:
    """One training rank's end.

    A transport whose engines fetch the bytes without the sender's help sets ``kind`` and overrides
    only ``open``, ``describe``, ``put``, ``take_receipt`` and ``close``; a ``lasting`` one also
    overrides ``begin`` and ``finish``.
    """

    kind: ClassVar[str]
    cut: ClassVar[bool] = False  # each engine rank gets blobs of its own, cut to its part
    lasting: ClassVar[bool] = False  # blobs stay until the version is finished
    one_machine: ClassVar[bool] = False  # it reaches only engines on the trainer's machine
    machines: int = 1  # machines whose parts of a bucket lie in one memory
    receipt_wait_s: ClassVar[float] = 2.0  # how long a receipt may take to be seen

    @classmethod
    def open(cls, site: Site) -> "Sender":
        """Open this rank's end; all training ranks call it together."""
        raise NotImplementedError

    def describe(self, engine: str, ranks: int) -> dict[str, Any]:
        """Return ``Message.transport``, with which an engine's ranks open their ends."""
        raise NotImplementedError

    def begin(self, version: int) -> None:
        """Start a new version; drop whatever an unfinished version has left."""

    def arrange(self, engines: Mapping[str, int]) -> dict[str, Turn]:
        """Decide how the bytes reach these engines; ``describe`` includes the decision.

        Args:
            engines: their TP sizes by name.

        Returns:
            Each engine's turn, by name.
        """
        return {engine: (place, len(engines)) for place, engine in enumerate(engines)}

    def connect(self, engines: Mapping[str, int]) -> Failures:
        """Open connections to these engines, keep those that are open, and close all others.

        All training ranks call it together with the same engines, while these handle "connect".

        Args:
            engines: their TP sizes by name.
        """
        return {}

    def room(self, index: int) -> Tensor | None:
        """Return the memory that the bucket ``index`` will be sent from, uint8, 1-D.

        Parts that are made there in order (``message.Room``) need not be copied. Its size is what
        earlier buckets needed. None: there is no such memory, or not yet.
        """
        return None

    def put(self, index: int, parts: Sequence[Shard], *, to: Rank | None = None) -> Blob:
        """Copy a bucket's parts to where engines can fetch them.

        Args:
            index: of the bucket in this version. The engines are done with bucket ``index - 2``,
                whose bytes may be overwritten.
            to: the engine rank they are for, if ``cut``.

        Raises:
            ConfigError: no room, or no right to write; names the path and the fix.
        """
        raise NotImplementedError

    def put_everywhere(self, index: int, parts: Sequence[Shard]) -> Mapping[Place, Blob]:
        """Put a bucket that is not ``cut``; return its blobs by the engines they are for.

        All training ranks call it together, or ``miss``. Arguments and errors as for ``put``.
        """
        return {None: self.put(index, parts)}

    def miss(self) -> None:
        """Stand in for ``put_everywhere`` on a rank that failed to make its bucket."""

    def deliver(self, index: int) -> None:
        """Start to send the bucket ``index``; return at once."""

    def settle(self) -> Failures:
        """Wait for all that was delivered; return the engines dropped since ``connect``."""
        return {}

    def drop(self, engine: str) -> None:
        """Send this engine nothing more, and no longer wait for it."""

    def receipts(self, session: str, ranks: int) -> list[Receipt]:
        """Take the engine ranks' receipts; a missing receipt becomes one with an error.

        An engine leaves its receipts before it answers.

        Raises:
            ConfigError: no receipt can be left, for instance because the disk is full.
        """
        deadline, pause_s = time.monotonic() + self.receipt_wait_s, POLL_S
        by_rank: dict[int, Receipt] = {}
        while True:
            for rank in range(ranks):
                if rank not in by_rank:
                    content = self.take_receipt(receipt_name(session, rank))
                    if content is not None:
                        by_rank[rank] = received(content, session, rank)
            if len(by_rank) == ranks or time.monotonic() > deadline:
                return [by_rank.get(r) or received(None, session, r) for r in range(ranks)]
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, SLOWEST_POLL_S)

    def take_receipt(self, name: str) -> bytes | None:
        """Return a receipt and remove it; None: it is not there yet.

        Raises:
            ConfigError: no receipt can be left, for instance because the disk is full.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Free the version: all engines that take part have it, and none will fetch it again."""

    def close(self) -> None:
        """Remove everything that this end made."""


class Receiver(Protocol):
    """One engine rank's end, opened from ``Message.transport``; it serves many sessions."""

    def follow(self, transport: dict[str, Any]) -> bool:
        """Begin the next session; return False if ``transport`` needs a new receiver.

        Raises:
            ConfigError: this receiver fits, but the sender cannot be reached.
        """

    def fetch(self, blob: Blob) -> Tensor:
        """Return the blob's bytes, uint8 [blob.bytes], valid until the next fetch.

        Raises:
            ConfigError: the bytes are missing, too short, or not to be trusted; names the place.
        """

    def report(self, receipt: Receipt) -> None:
        """Leave a receipt for the sender.

        Raises:
            ConfigError: it cannot be left there.
        """

    def close(self) -> None: ...


def receipt_name(session: str, rank: int) -> str:
    """Return the name under which a receipt is left; no name is used twice."""
    return f"{session}-{rank}.json"


def received(content: bytes | None, session: str, rank: int) -> Receipt:
    """Read an engine rank's receipt; a missing or wrong one becomes a receipt with an error."""
    reason = f"engine rank {rank} left no receipt"
    if content is not None:
        try:
            receipt = decode(Receipt, content)
            if (receipt.session, receipt.rank) == (session, rank):
                return receipt
            whose = f"of rank {receipt.rank} in {shortened(receipt.session)}"
            reason = f"engine rank {rank} left a receipt {whose}"
        except Malformed as error:
            reason = f"an engine left a malformed receipt ({error}); {SAME_PACKAGE}"
    return Receipt(session, rank, reason, 0, 0.0)


def own_facts() -> dict[str, str]:
    """Return the versions and settings that both ends compare before a byte is sent.

    Trainer and engines come from two environments, each with its own torch and NCCL. Most
    differences are harmless; the others end in a crash or a hang far from their cause.
    """
    nccl = "none"
    if torch.distributed.is_nccl_available() and torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "protocol": FORMAT,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "none",
        "nccl": nccl,
        **{name: os.environ.get(name, "unset") for name in NCCL_SETTINGS},
    }


def disagreement(carrier: str, trainer: Mapping[str, str], engine: Mapping[str, str]) -> str | None:
    """Return the reason why two ends cannot be joined, as a sentence; None if they can.

    Args:
        carrier: what carries the bytes: "nccl", "gloo" or "memory".
    """
    for name, reason in EQUAL.items():
        at_trainer, at_engine = trainer.get(name, "unknown"), engine.get(name, "unknown")
        if at_trainer != at_engine and (name == "protocol" or carrier == "nccl"):
            return (
                f"the trainer has {name} {at_trainer} (torch {trainer.get('torch')}), the engine "
                f"{name} {at_engine} (torch {engine.get('torch')}), and {reason}"
            )
    return None


def settle_nccl() -> None:
    """Set NCCL as SGLang does, unless the environment says otherwise; call before NCCL is used.

    Engines started here inherit the settings.
    """
    for name in NCCL_SETTINGS:
        os.environ.setdefault(name, "0")
