"""What SGLang calls with each message of an update (``--custom-weight-loader``), on every rank.

A session is one publication to one engine. Its pieces are copied into the live parameters as they
come, each after its checksum was verified, and what they cover is written down; "check" then asks
for a receipt, and only where every rank's is clean does the trainer let the engine generate again.

An exception here would end SGLang's scheduler, and with it every request. So whatever goes wrong is
remembered, the first cause first, and told in the receipt. The rest of such a session is fetched,
because a sender may be waiting for that, and dropped; the next session starts afresh, and a whole
one mends whatever a broken one left.

Messages are JSON, and bytes are only ever viewed as numbers: nothing is unpickled here.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from qurl_megatron.engines.sglang.targets import pointers, targets, tensor_rank, turn_back
from qurl_megatron.errors import ConfigError
from qurl_megatron.tensors.slice import Shard, Slice
from qurl_megatron.wire.message import Blob, Message, Piece, Receipt, checksum, piece_of
from qurl_megatron.wire.transport import Receiver
from qurl_megatron.wire.transports import open_receiver

logger = logging.getLogger(__name__)

Open = Callable[[dict, int], Receiver]
"""Opens this rank's end of ``Message.transport``."""

_NAMED = 3  # tensors named in one error; a shard that is missing lacks hundreds


@dataclass
class Session:
    """One publication, as far as this rank has got with it."""

    id: str
    rank: int = 0
    targets: dict[str, Shard] = field(default_factory=dict)
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


@dataclass
class Rank:
    """What is kept from message to message; the way to the sender is, from version to version."""

    open_receiver: Open
    session: Session | None = None
    past: set[str] = field(default_factory=set)  # sessions that another one has followed
    receiver: Receiver | None = None

    def reach(self, transport: dict, rank: int) -> None:
        """
        Raises:
            ConfigError: the sender's end cannot be opened.
        """
        if self.receiver is not None and self.receiver.follow(transport):
            return
        self.release()
        self.receiver = self.open_receiver(transport, rank)

    def release(self) -> None:
        receiver, self.receiver = self.receiver, None
        if receiver is None:
            return
        try:
            receiver.close()
        except Exception:  # see the top; a dead sender's leavings must not stop the next one
            logger.exception("closing the transport of weight updates")


_ranks: "WeakKeyDictionary[nn.Module, Rank]" = WeakKeyDictionary()


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """SGLang's hook: ``named_tensors`` is ``wire.payload``'s one pair, and the name the message."""
    try:
        message = Message.from_json(named_tensors[0][0])
    except ConfigError as error:
        logger.error("%s", error)  # of no session, so there is nowhere to leave a receipt
        return
    if model not in _ranks:
        _ranks[model] = Rank(open_receiver)
    handle(model, _ranks[model], message)


@torch.no_grad()
def handle(model: nn.Module, rank: Rank, message: Message) -> None:
    """One message; never raises for what it brings."""
    started = time.perf_counter()
    if rank.session is None or rank.session.id != message.session:
        if message.session in rank.past:
            logger.error("weight update %s is over: a late message is dropped", message.session)
            return
        _begin(model, rank, message)
    session = rank.session
    try:
        _ACTIONS[message.action](model, rank, message)
    except Exception as error:  # it would end the scheduler, and all requests with it
        logger.exception("weight update %s", session.id)
        session.fail(f"{message.action} failed: {error!r}")
    session.seconds += time.perf_counter() - started
    if message.action in ("check", "finish"):
        _report(rank)


def _begin(model: nn.Module, rank: Rank, message: Message) -> None:
    if rank.session is not None:
        rank.past.add(rank.session.id)
        if rank.session.unreachable:
            rank.release()
    session = rank.session = Session(message.session)
    try:
        session.rank = tensor_rank(model)
        rank.reach(message.transport, session.rank)
        session.targets = targets(model)
    except ConfigError as error:
        session.fail(str(error))
    except Exception as error:  # see the top
        logger.exception("weight update %s", session.id)
        session.fail(repr(error))


def _connect(model: nn.Module, rank: Rank, message: Message) -> None:
    """The first message of a session has opened the transport, whatever its action."""


def _bucket(model: nn.Module, rank: Rank, message: Message) -> None:
    session = rank.session
    if message.index in session.buckets:
        session.fail(f"bucket {message.index} came twice")
    session.buckets.add(message.index)
    for blob in message.blobs:
        data = _fetch(rank, blob)
        if data is None:
            continue
        for piece in blob.pieces:
            if session.error is not None:
                break  # fetched, and dropped
            try:
                _take(session, data, piece)
            except ConfigError as error:
                session.fail(str(error))
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # the sender may overwrite the bytes once this call is answered


def _fetch(rank: Rank, blob: Blob) -> Tensor | None:
    """The blob's bytes; None where there is nothing in it for this rank, or no way to it."""
    session = rank.session
    if rank.receiver is None or session.unreachable:
        return None
    if session.error is None and not any(_needed(session, piece) for piece in blob.pieces):
        return None
    try:
        return rank.receiver.fetch(blob)
    except ConfigError as error:
        session.unreachable = True
        session.fail(str(error))
        return None


def _needed(session: Session, piece: Piece) -> bool:
    """True also for a piece that ``_take`` will refuse."""
    target = session.targets.get(piece.name)
    if target is None or len(piece.shape) != len(target.shape):
        return True
    return piece.part.overlap(target.part) is not None


def _take(session: Session, data: Tensor, piece: Piece) -> None:
    """Copy what this rank needs of a piece into place.

    Raises:
        ConfigError: it is not what the model has under this name, comes a second time, or is
            damaged; nothing of it has been written.
    """
    target = session.targets.get(piece.name)
    if target is None:
        raise ConfigError(f"{piece.name} is not a tensor of the engine's model")
    _check_piece(piece, target)
    part = piece.part.overlap(target.part)
    if part is None:
        return
    covered = session.covered.setdefault(piece.name, [])
    if any(part.overlap(other) for other in covered):
        raise ConfigError(f"{_what(piece)} came twice")
    value = piece_of(data, piece)
    _verify(piece, value)
    part.narrow(target.value, target.part).copy_(part.narrow(value, piece.part))
    covered.append(part)
    session.bytes += part.elements * target.value.element_size()


def _check_piece(piece: Piece, target: Shard) -> None:
    dtype = str(target.value.dtype).removeprefix("torch.")
    if piece.dtype != dtype:
        raise ConfigError(f"{piece.name} came as {piece.dtype}, the engine holds {dtype}")
    fits = len(piece.shape) == len(target.shape) and all(
        piece.start >= 0 and piece.stop <= whole if axis == piece.dim else size == whole
        for axis, (size, whole) in enumerate(zip(piece.shape, target.shape, strict=False))
    )
    if not fits:
        raise ConfigError(
            f"{_what(piece)} of shape {list(piece.shape)} is not a part of the engine's "
            f"{list(target.shape)}"
        )


def _verify(piece: Piece, value: Tensor) -> None:
    """Raise ConfigError unless the bytes are those that were sent."""
    if checksum(value) != piece.checksum:
        raise ConfigError(f"{_what(piece)} is damaged: its checksum does not agree")


def _check(model: nn.Module, rank: Rank, message: Message) -> None:
    session = rank.session
    absent = sorted(set(range(message.index)) - session.buckets)
    if absent:
        session.fail(f"bucket {absent[0]} of {message.index} did not arrive")
    missing = [
        (name, arrived)
        for name, target in session.targets.items()
        if (arrived := sum(part.elements for part in session.covered.get(name, ())))
        != target.value.numel()
    ]
    if missing:
        what = [
            f"{name} ({'none' if not arrived else 'a part only'} of it arrived)"
            for name, arrived in missing[:_NAMED]
        ]
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        session.fail(f"the update is incomplete: {', '.join(what)}{more}")


def _finish(model: nn.Module, rank: Rank, message: Message) -> None:
    """Ready for SGLang, which transposes at the end of its own session, whatever happened."""
    turn_back(model)


_ACTIONS: dict[str, Callable[[nn.Module, Rank, Message], None]] = {
    "connect": _connect,
    "bucket": _bucket,
    "check": _check,
    "finish": _finish,
}


def _report(rank: Rank) -> None:
    session = rank.session
    if rank.receiver is None:
        return  # nowhere to leave it: the sender finds none, and that is an error too
    try:
        rank.receiver.report(
            Receipt(
                session=session.id,
                rank=session.rank,
                error=session.error,
                bytes=session.bytes,
                seconds=session.seconds,
                pointers=pointers(session.targets),
            )
        )
    except Exception:  # see the top; the sender finds no receipt
        logger.exception("weight update %s: no receipt could be left", session.id)


def _what(piece: Piece) -> str:
    if piece.dim is None:
        return piece.name
    lines = ("rows", "columns")[piece.dim]
    return f"{piece.name} {lines} [{piece.start}, {piece.stop})"
