"""What a weight update says on the wire: pieces of tensors in blobs, blobs in buckets.

    bucket   one call to an engine, at most ``sync.bucket_mb`` of quantized bytes per training rank
      blob   what one training rank adds to it: a run of bytes, and where an engine finds them
        piece  the rows (or columns) ``[start, start + shape[dim])`` of one Hugging Face tensor

Nobody joins pieces into whole tensors: an engine rank copies the part of each piece that it needs
into its live parameters. The description travels as JSON inside the one argument that SGLang hands
to a custom weight loader; the bytes take the transport's own way, and are never unpickled.
"""

import base64
import binascii
import json
import math
import pickle
import pickletools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import orjson
import torch
import xxhash
from torch import Tensor

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.slice import Shard, Slice, part_at
from qurl_megatron.wire import schema

FORMAT = "qurl-update-1"
LOADER = "qurl_megatron.engines.sglang.loader.load"
"""``load_format`` of our updates: the function that SGLang imports and calls with each message."""

ALIGNMENT = 64  # bytes; pieces begin at multiples, so that any dtype can view them
WORDS = 4 << 20  # summed at a time on a GPU: bounds the memory that takes
MULTIPLIER = 0x5851F42D4C957F2D  # Knuth's, for linear congruential generators
Text = str | bytes
Action = Literal["connect", "bucket", "check", "finish"]


@dataclass(frozen=True)
class Piece:
    """Part of one whole tensor, and where its bytes lie in its blob."""

    name: str  # Hugging Face name
    dtype: str  # torch's name, e.g. "int8"
    shape: tuple[int, ...]  # of the piece
    dim: int | None  # the dimension along which it is a part; None: it is the whole tensor
    start: int  # first row or column along ``dim``
    offset: int  # of its first byte in the blob
    checksum: str

    @property
    def bytes(self) -> int:
        return getattr(torch, self.dtype).itemsize * torch.Size(self.shape).numel()

    @property
    def stop(self) -> int:
        """One beyond the last row or column; 1 for a whole tensor, which counts as one."""
        return self.start + (1 if self.dim is None else self.shape[self.dim])

    @property
    def part(self) -> Slice:
        return part_at(self.shape, self.dim, self.start)


@dataclass(frozen=True)
class Blob:
    """One training rank's share of a bucket for one engine rank."""

    where: dict[str, Any]  # where the transport finds it
    bytes: int
    pieces: tuple[Piece, ...]


Encoded = orjson.Fragment
"""Blobs as JSON already: those of a bucket go to many engines, and are made JSON once."""


def encoded(blobs: Sequence[Blob]) -> Encoded:
    return Encoded(orjson.dumps(blobs))


@dataclass(frozen=True)
class Message:
    """One call of the loader on one engine rank.

    ``connect`` opens the transport, ``bucket`` brings weights, ``check`` asks for a receipt,
    ``finish`` readies what was written for the engine: SGLang post-processes it, the embedded one
    packs it.
    """

    action: Action
    session: str  # one publication to one engine; anything left of another is dropped
    version: int
    index: int = 0  # of a bucket; of ``check``: how many there were
    transport: dict[str, Any] = field(default_factory=dict)  # {"kind": "files" | "memory" | ...}
    blobs: tuple[Blob, ...] | Encoded = ()

    def to_json(self) -> str:
        return orjson.dumps({"format": FORMAT, **vars(self)}).decode()

    @staticmethod
    def from_json(text: str) -> "Message":
        """
        Raises:
            ConfigError: not a message of this format.
        """
        try:
            raw = schema.parse(text)
            if schema.record(raw) and raw.pop("format", None) != FORMAT:
                raise ConfigError(f"the weight update is not of format {FORMAT}")
            raw = schema.fields(raw, _MESSAGE)
            return Message(**{**raw, "blobs": tuple(map(_blob, raw["blobs"]))})
        except schema.Malformed as error:
            raise ConfigError(f"the weight update is malformed: {error}") from None


@dataclass(frozen=True)
class Receipt:
    """One engine rank's answer for a whole version: ``error`` is None where all of it arrived."""

    session: str
    rank: int
    error: str | None
    bytes: int  # copied into live parameters
    seconds: float  # spent in the loader
    pointers: str = ""  # checksum over the addresses of the parameters: they must never move

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: Text) -> "Receipt":
        """
        Raises:
            ConfigError: it is of another version of this package.
        """
        try:
            return Receipt(**schema.fields(schema.parse(text), _RECEIPT))
        except schema.Malformed as error:
            raise ConfigError(
                f"an engine left a malformed receipt ({error}); install the same version of "
                "this package in the engines' environment"
            ) from None


def _blob(raw: Any) -> Blob:
    raw = schema.fields(raw, _BLOB)
    pieces = tuple(map(_piece, raw["pieces"]))
    for piece in pieces:
        if piece.offset + piece.bytes > raw["bytes"]:
            raise schema.Malformed(f"{piece.name} ends behind the end of its blob")
    return Blob(raw["where"], raw["bytes"], pieces)


def _piece(raw: Any) -> Piece:
    raw = schema.fields(raw, _PIECE)
    piece = Piece(**{**raw, "shape": tuple(raw["shape"])})
    if piece.dim is not None and piece.dim >= len(piece.shape):
        raise schema.Malformed(f"{piece.name} has no dimension {piece.dim}")
    if piece.offset % getattr(torch, piece.dtype).itemsize:
        raise schema.Malformed(f"{piece.name} begins in the middle of a number")
    return piece


def is_dtype(name: Any) -> bool:
    """torch's name of a number format."""
    return schema.text(name) and isinstance(getattr(torch, name, None), torch.dtype)


def is_shape(value: Any) -> bool:
    return schema.list_of(schema.count)(value) and math.prod(value) <= schema.LARGEST


_PIECE: dict[str, schema.Range] = {
    "name": schema.text,
    "dtype": is_dtype,
    "shape": is_shape,
    "dim": schema.or_none(schema.count),
    "start": schema.count,
    "offset": schema.count,
    "checksum": schema.text,
}
_BLOB: dict[str, schema.Range] = {
    "where": schema.record,
    "bytes": schema.count,
    "pieces": schema.list_of(schema.record),
}
_MESSAGE: dict[str, schema.Range] = {
    "action": lambda value: value in get_args(Action),
    "session": schema.text,
    "version": schema.count,
    "index": schema.count,
    "transport": schema.record,
    "blobs": schema.list_of(schema.record),
}
_RECEIPT: dict[str, schema.Range] = {
    "session": schema.text,
    "rank": schema.count,
    "error": schema.or_none(schema.text),
    "bytes": schema.count,
    "seconds": schema.seconds,
    "pointers": schema.text,
}


def raw(tensor: Tensor) -> Tensor:
    """A tensor's bytes, uint8 and 1-D; a view where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def checksum(data: Tensor) -> str:
    """Finds damage, not malice: XXH3-128 of a tensor's bytes, or a sum where they are on a GPU."""
    if data.is_cuda:
        return f"sum64-{word_sum(raw(data)):016x}"
    return xxhash.xxh3_128_hexdigest(raw(data).numpy().data)


def word_sum(data: Tensor) -> int:
    """A checksum that a GPU computes at the speed of its memory: the sum, modulo 2**64, of all
    words of 8 bytes, each scrambled with its place. A single changed word always shows.

    Args:
        data: uint8 [n].
    """
    if len(data) % 8 or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(-len(data) % 8)])
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for run, words in enumerate(data.view(torch.int64).split(WORDS)):
        place = torch.arange(run * WORDS, run * WORDS + len(words), device=data.device)
        total += _scrambled(_scrambled(words + place * MULTIPLIER)).sum()
    return int(total.item()) % 2**64


def _scrambled(words: Tensor) -> Tensor:
    """One to one. The mask makes the shift a logical one: torch's repeats the sign."""
    return (words ^ ((words >> 29) & (2**35 - 1))) * MULTIPLIER


def piece_at(part: Shard, offset: int, checksum: str = "") -> Piece:
    """What is said of a part whose bytes lie at ``offset`` of a blob."""
    dtype = str(part.value.dtype).removeprefix("torch.")
    shape = tuple(part.value.shape)
    return Piece(part.name, dtype, shape, part.dim, part.start, offset, checksum)


def lay_out(parts: Iterable[Shard]) -> tuple[list[Piece], int]:
    """Places for ``parts`` in one blob, one after another.

    Returns:
        The pieces without checksums (those need the bytes on the host), and the blob's size.
    """
    pieces, offset = [], 0
    for part in parts:
        piece = piece_at(part, offset)
        pieces.append(piece)
        offset = _aligned(offset + piece.bytes)
    return pieces, offset


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


class Room:
    """A blob's bytes, handed out in the order of ``lay_out``: what is made there is not copied."""

    def __init__(self, memory: Tensor | None) -> None:
        """
        Args:
            memory: uint8, 1-D; None where blobs are not made in place.
        """
        self._memory, self._end = memory, 0

    def place(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Memory for the blob's next tensor; None where there is no room for it."""
        start, size = self._end, math.prod(shape) * dtype.itemsize
        if self._memory is None or start + size > len(self._memory):
            return None
        self._end = _aligned(start + size)
        return self._memory[start : start + size].view(dtype).view(shape)


def fill(blob: Tensor, pieces: Sequence[Piece], tensors: Sequence[Tensor]) -> tuple[Piece, ...]:
    """Copy tensors to their places in a blob's bytes (uint8, 1-D); the pieces with checksums.

    Those that lie in their places already stay: they were made in a ``Room`` over the same bytes.
    """
    filled = []
    for piece, tensor in zip(pieces, tensors, strict=True):
        place = piece_of(blob, piece)
        if tensor.data_ptr() != place.data_ptr():
            place.copy_(tensor)
        filled.append(replace(piece, checksum=checksum(place)))
    if blob.is_cuda:
        # Other processes, and other streams of this one, do not wait for this stream.
        torch.cuda.current_stream(blob.device).synchronize()
    return tuple(filled)


def piece_of(blob: Tensor, piece: Piece) -> Tensor:
    """The piece's tensor, as a view into the blob's bytes (uint8, 1-D)."""
    data = blob[piece.offset : piece.offset + piece.bytes]
    return data.view(getattr(torch, piece.dtype)).view(piece.shape)


class _Inline:
    """Pickles as a call that SGLang's restricted unpickler allows and that makes a small tensor."""

    def __reduce__(self) -> tuple:
        return torch.ByteTensor, ([0],)


def payload(messages: Sequence[Message]) -> list[str]:
    """``serialized_named_tensors`` of SGLang's update_weights_from_tensor, one per engine rank.

    SGLang wants a pickled list of (name, tensor): the name is our message, the tensor is empty of
    meaning. A message that stands in the list several times is pickled once.
    """
    distinct = {id(message): message for message in messages}
    pickled = {key: _pickled(message) for key, message in distinct.items()}
    return [pickled[id(message)] for message in messages]


def _pickled(message: Message) -> str:
    return base64.b64encode(pickle.dumps([(message.to_json(), _Inline())])).decode()


def message_in(serialized: str) -> Message:
    """The message in one entry of ``payload``; the pickle is read as a list of words, and never
    unpickled.

    Raises:
        ConfigError: it is not such an entry.
    """
    try:
        words = pickletools.genops(base64.b64decode(serialized, validate=True))
        content = next((word for _, word, _ in words if isinstance(word, str)), "")
    except (binascii.Error, TypeError, ValueError):
        content = ""
    return Message.from_json(content)
