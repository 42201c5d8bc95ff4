"""One weight update as an engine rank takes it in, whatever kind of engine that is.

A session is one publication to one engine. Its pieces are copied into the live weights as they
come, each after its checksum was verified, and their places are recorded. "check" then asks for a
receipt, and only if every rank's is clean does the trainer let the engine generate again.

An exception here would end SGLang's scheduler, and with it every request. So the first error of a
session is kept and reported in its receipt. The rest of such a session is fetched, because a sender
may be waiting for that, and dropped; the next session starts from scratch, and a whole one repairs
whatever a broken one left.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.schemes import SCALES
from qurl_megatron.tensors.slice import Shard, Slice
from qurl_megatron.wire.files import FilesReceiver, FilesSender
from qurl_megatron.wire.group import GroupReceiver, GroupSender
from qurl_megatron.wire.message import (
    Blob,
    Message,
    Piece,
    Receipt,
    checksums,
    in_turn,
    piece_of,
)
from qurl_megatron.wire.relay import RelayReceiver, RelaySender
from qurl_megatron.wire.shared_memory import MemoryReceiver, MemorySender
from qurl_megatron.wire.transport import Receiver, Sender

logger = logging.getLogger(__name__)

Open = Callable[[dict, int], Receiver]
"""Opens this rank's end of ``Message.transport``."""


class Transport(NamedTuple):
    """Both ends of a transport."""

    sender: type[Sender]
    receiver: Open


TRANSPORTS = {
    "memory": Transport(MemorySender, MemoryReceiver),
    "files": Transport(FilesSender, FilesReceiver),
    "group": Transport(GroupSender, GroupReceiver),
    "relay": Transport(RelaySender, RelayReceiver),
}
_NAMED = 3  # tensors named in one error; a shard that is missing lacks hundreds


def open_receiver(transport: dict[str, Any], rank: int) -> Receiver:
    """Open the engine's end of the transport that ``Sender.describe`` describes.

    Args:
        rank: this engine's tensor-parallel rank.

    Raises:
        ConfigError: no such transport, or its other end cannot be reached in time.
    """
    kind = transport.get("kind")
    if kind not in TRANSPORTS:
        raise ConfigError(f"transport {kind!r} is unknown; this engine has {', '.join(TRANSPORTS)}")
    try:
        return TRANSPORTS[kind].receiver(transport, rank)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the description of transport {kind} is malformed: {error!r}") from None


class LiveWeights(Protocol):
    """The weights of one engine rank, where an update writes them."""

    def tensor_rank(self) -> int:
        """Return this process's rank among the engine's tensor-parallel ranks.

        Raises:
            ConfigError: the engine is split in a way that updates do not know.
        """

    def targets(self) -> Mapping[str, Shard]:
        """Return this rank's part of every tensor that an update must bring, by Hugging Face name.

        The values are views into live memory, which never moves.

        Raises:
            ConfigError: a part of the model is not understood.
        """

    def takes(self, target: Shard, dtype: torch.dtype) -> bool:
        """Return whether values of ``dtype`` may be copied into this target."""

    def finish(self) -> None:
        """Make a whole update the weights that a forward pass reads."""


@dataclass
class UpdateSession:
    """One publication, as far as this rank has taken it in."""

    id: str
    weights: LiveWeights
    rank: int = 0
    targets: Mapping[str, Shard] = field(default_factory=dict)
    covered: dict[str, list[Slice]] = field(default_factory=dict)
    buckets: set[int] = field(default_factory=set)
    error: str | None = None
    unreachable: bool = False  # a fetch failed, and the next would wait as long
    bytes: int = 0
    seconds: float = 0.0

    def fail(self, error: str) -> None:
        if self.error is None:
            logger.error("weight update %s: %s", self.id, error)
            self.error = error

    @contextmanager
    def failing(self, doing: str) -> Iterator[None]:
        """Turn whatever is raised into the session's error."""
        try:
            yield
        except ConfigError as error:
            self.fail(str(error))
        except Exception as error:  # it would end the scheduler, and all requests with it
            logger.exception("weight update %s", self.id)
            self.fail(f"{doing} failed: {error!r}")

    def needs(self, piece: Piece) -> bool:
        """Return whether this rank must fetch the piece: a part of it is ours, or it is wrong."""
        target = self.targets.get(piece.name)
        if target is None or len(piece.shape) != len(target.shape):
            return True
        return piece.part.overlap(target.part) is not None

    def take(self, data: Tensor, pieces: Sequence[Piece]) -> None:
        """Copy this rank's part of each piece into place.

        Args:
            data: bytes of the pieces' blob, uint8, 1-D.

        Raises:
            ConfigError: a piece does not match the engine's tensor of its name, comes a second
                time, or is damaged. None of that piece has been written.
        """
        kept = []
        for piece in pieces:
            target = self.targets.get(piece.name)
            if target is None:
                raise ConfigError(f"{piece.name} is not a tensor of the engine's model")
            self._check(piece, target)
            source, live = piece.part, target.part
            part = source.overlap(live)
            if part is not None:
                kept.append((piece, target, source, live, part, piece_of(data, piece)))
        # Wait for a GPU once per blob: a model with experts has tens of thousands of pieces.
        sums = checksums(data, [piece.place for piece, *_ in kept])
        scales = [value.flatten() for piece, *_, value in kept if _is_scale(piece)]
        sound = not scales or _usable(torch.cat(scales))
        for (piece, target, source, live, part, value), checksum in zip(kept, sums, strict=True):
            covered = self.covered.setdefault(piece.name, [])
            if any(part.overlap(other) for other in covered):
                raise ConfigError(f"{_label(piece)} came twice")
            if checksum != piece.checksum:
                raise ConfigError(f"{_label(piece)} is damaged: its checksum does not agree")
            if not sound and _is_scale(piece) and not _usable(value):
                raise ConfigError(f"{_label(piece)} holds scales that are not positive and finite")
            part.narrow(target.value, live).copy_(part.narrow(value, source))
            covered.append(part)
            self.bytes += part.elements * target.value.element_size()

    def complete(self, buckets: int) -> None:
        """Fail unless all buckets and every element of every tensor have arrived."""
        absent = sorted(set(range(buckets)) - self.buckets)
        if absent:
            self.fail(f"bucket {absent[0]} of {buckets} did not arrive")
        gaps = []
        for name, target in self.targets.items():
            arrived = sum(part.elements for part in self.covered.get(name, ()))
            if not arrived and target.value.numel():
                gaps.append(f"{name} (none of it arrived)")
            elif arrived != target.value.numel():
                gaps.append(f"{name} (a part only of it arrived)")
        if gaps:
            remainder = f" and {len(gaps) - _NAMED} more" if len(gaps) > _NAMED else ""
            self.fail(f"the update is incomplete: {', '.join(gaps[:_NAMED])}{remainder}")

    def receipt(self) -> Receipt:
        return Receipt(
            session=self.id,
            rank=self.rank,
            error=self.error,
            bytes=self.bytes,
            seconds=self.seconds,
            pointers=pointers(self.targets),
        )

    def _check(self, piece: Piece, target: Shard) -> None:
        if not self.weights.takes(target, getattr(torch, piece.dtype)):
            dtype = str(target.value.dtype).removeprefix("torch.")
            raise ConfigError(f"{piece.name} came as {piece.dtype}, the engine holds {dtype}")
        fits = len(piece.shape) == len(target.shape) and all(
            piece.stop <= full_size if axis == piece.dim else size == full_size
            for axis, (size, full_size) in enumerate(zip(piece.shape, target.shape, strict=False))
        )
        if not fits:
            raise ConfigError(
                f"{_label(piece)} of shape {list(piece.shape)} is not a part of the engine's "
                f"{list(target.shape)}"
            )


class UpdateEnd:
    """An engine rank's end of all updates; its receiver is kept from version to version."""

    def __init__(self, weights: LiveWeights, opened: Open = open_receiver) -> None:
        self._weights, self._open = weights, opened
        self._session: UpdateSession | None = None
        self._past: set[str] = set()  # sessions that were superseded
        self._receiver: Receiver | None = None

    @torch.no_grad()
    def handle(self, message: Message) -> None:
        """Take in one message; never raises for its content."""
        started = time.perf_counter()
        if message.session in self._past:
            logger.error("weight update %s is over: a late message is dropped", message.session)
            return
        session = self._session
        if session is None or session.id != message.session:
            session = self._begin(message)
        with session.failing(message.action):
            match message.action:
                case "bucket":
                    self._bucket(session, message)
                case "check":
                    session.complete(message.index)
                case "finish":
                    self._weights.finish()
        session.seconds += time.perf_counter() - started
        if message.action in ("check", "finish"):
            self._report(session)

    def _begin(self, message: Message) -> UpdateSession:
        """Open the transport for a session's first message, whatever its action."""
        if self._session is not None:
            self._past.add(self._session.id)
            if self._session.unreachable:
                self._release()
        session = self._session = UpdateSession(message.session, self._weights)
        with session.failing("opening the transport"):
            session.rank = self._weights.tensor_rank()
            if self._receiver is None or not self._receiver.follow(message.transport):
                self._release()
                self._receiver = self._open(message.transport, session.rank)
            session.targets = self._weights.targets()
        return session

    def _bucket(self, session: UpdateSession, message: Message) -> None:
        if message.index in session.buckets:
            session.fail(f"bucket {message.index} came twice")
        session.buckets.add(message.index)
        for blob in in_turn(message.blobs, message.turn):
            data = self._fetch(session, blob)
            if data is None:
                continue
            if session.error is None:  # otherwise the bytes are fetched and dropped
                with session.failing("loading"):
                    session.take(data, blob.pieces)
        if torch.cuda.is_initialized():
            # The sender may overwrite the bytes once this is answered. Wait for no other stream:
            # it may be waiting for another engine.
            torch.cuda.current_stream().synchronize()

    def _fetch(self, session: UpdateSession, blob: Blob) -> Tensor | None:
        """Return the blob's bytes; None if this rank needs none of them, or they are lost."""
        if self._receiver is None or session.unreachable:
            return None
        if session.error is None and not any(map(session.needs, blob.pieces)):
            return None
        with session.failing("fetching"):
            return self._receiver.fetch(blob)
        session.unreachable = True
        return None

    def _release(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        try:
            receiver.close()
        except Exception:  # see the top; a dead sender must not stop the next one
            logger.exception("closing the transport of weight updates")

    def _report(self, session: UpdateSession) -> None:
        if self._receiver is None:
            return  # the sender counts a missing receipt as an error
        try:
            self._receiver.report(session.receipt())
        except Exception:  # see the top; the sender counts a missing receipt as an error
            logger.exception("weight update %s: no receipt could be left", session.id)


def pointers(targets: Mapping[str, Shard]) -> str:
    """Return a checksum of the targets' addresses and strides, which no update may change."""
    places = [(name, t.value.data_ptr(), t.value.stride()) for name, t in sorted(targets.items())]
    return xxhash.xxh3_128_hexdigest(repr(places).encode())


def _is_scale(piece: Piece) -> bool:
    return piece.name.endswith(SCALES)


def _usable(scales: Tensor) -> bool:
    return bool((scales.isfinite() & (scales > 0)).all())


def _label(piece: Piece) -> str:
    if piece.dim is None:
        return piece.name
    lines = ("rows", "columns")[piece.dim]
    return f"{piece.name} {lines} [{piece.start}, {piece.stop})"
