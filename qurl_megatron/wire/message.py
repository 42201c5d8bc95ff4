"""The messages of a weight update: buckets of blobs, which hold pieces of tensors.

    bucket   one call to an engine, at most ``sync.bucket_mb`` of quantized bytes per training rank
      blob   one training rank's bytes in it, and where an engine finds them
        piece  the rows (or columns) ``[start, start + shape[dim])`` of one Hugging Face tensor

Nobody joins pieces into whole tensors: an engine rank copies its part of each piece into its live
parameters. The description travels as JSON inside the one argument that SGLang hands to a custom
weight loader; the bytes take the transport's own way, and are never unpickled.
"""

import base64
import binascii
import math
import pickle
import pickletools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
import torch
import xxhash
from torch import Tensor

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.record import LARGEST, Count, Malformed, Record, Seconds, decode
from qurl_megatron.tensors.slice import Shard, Slice, part_at

FORMAT = "qurl-update-4"
ALIGNMENT = 64  # bytes; pieces begin at multiples, so that any dtype can view them
BLOBS_BYTES = 1 << 28  # more than the unpacked description of any bucket has
WORDS = 4 << 20  # summed at a time on a GPU, to bound memory
MULTIPLIER = 0x5851F42D4C957F2D  # Knuth's, for linear congruential generators
SAME_PACKAGE = "install the same version of qurl-megatron in both environments"
Action = Literal["connect", "bucket", "check", "finish"]

Turn = tuple[Count, Count]
"""An engine's place among those that fetch the same bytes at once, and their number."""


class Piece(Record, frozen=True):
    """Part of one tensor, and where its bytes lie in its blob."""

    name: str  # Hugging Face name
    dtype: str  # torch's name, e.g. "int8"
    shape: tuple[Count, ...]  # of the piece
    dim: Count | None  # along which the tensor is cut; None: it is the whole tensor
    start: Count  # first row or column along ``dim``
    offset: Count  # of its first byte in the blob
    checksum: str

    def __post_init__(self) -> None:
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"{self.name} cannot have dtype {self.dtype}")
        if math.prod(self.shape) > LARGEST:
            raise ValueError(f"{self.name} cannot have shape {self.shape}")
        if self.dim is not None and self.dim >= len(self.shape):
            raise ValueError(f"{self.name} has no dimension {self.dim}")
        if self.offset % getattr(torch, self.dtype).itemsize:
            raise ValueError(f"{self.name} begins in the middle of a number")

    @property
    def bytes(self) -> int:
        return getattr(torch, self.dtype).itemsize * math.prod(self.shape)

    @property
    def place(self) -> tuple[int, int]:
        """Where its bytes begin and end in the blob."""
        return self.offset, self.offset + self.bytes

    @property
    def stop(self) -> int:
        """One beyond the last row or column; a whole tensor counts as one row."""
        if self.dim is None:
            return self.start + 1
        return self.start + self.shape[self.dim]

    @property
    def part(self) -> Slice:
        return part_at(self.shape, self.dim, self.start)


class Blob(Record, frozen=True):
    """One training rank's share of a bucket for one engine rank."""

    where: dict[str, Any]  # where the transport finds it
    bytes: Count
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        for piece in self.pieces:
            if piece.offset + piece.bytes > self.bytes:
                raise ValueError(f"{piece.name} ends behind the end of its blob")


class Message(Record, frozen=True, tag_field="format", tag=FORMAT):
    """One call of the loader on one engine rank.

    ``connect`` opens the transport, ``bucket`` brings weights, ``check`` asks for a receipt,
    ``finish`` makes the weights ready for a forward pass.
    """

    action: Action
    session: str  # one publication to one engine
    index: Count = 0  # of a bucket; of ``check``: how many there were
    transport: dict[str, Any] = {}  # {"kind": "files" | "memory" | ...}
    blobs: tuple[Blob, ...] = ()
    packed: bytes = b""  # the blobs as ``encoded`` bytes, sent in place of ``blobs``
    turn: Turn = (0, 1)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str) -> "Message":
        """Parse and check a message.

        Raises:
            ConfigError: not a message of this format.
        """
        try:
            message = decode(Message, text)
            if not message.packed:
                return message
            # A longer description is cut off here, and so fails as invalid JSON.
            description = zlib.decompressobj().decompress(message.packed, BLOBS_BYTES)
            blobs = decode(tuple[Blob, ...], description)
            return msgspec.structs.replace(message, blobs=blobs, packed=b"")
        except (Malformed, zlib.error) as error:
            raise ConfigError(f"the weight update is malformed: {error}; {SAME_PACKAGE}") from None


def in_turn(blobs: Sequence[Blob], turn: Turn) -> list[Blob]:
    """Return a bucket's blobs in the order in which an engine's ranks fetch them.

    Engines begin with different training ranks. If all began with the first one, they would share
    its link while the other links are idle. The ranks of one engine have the same turn, since a
    training rank sends to all of them at once.
    """
    place, count = turn
    first = place * len(blobs) // count
    return [*blobs[first:], *blobs[:first]]


class Receipt(Record, frozen=True):
    """One engine rank's answer for a whole version: ``error`` is None if all of it arrived."""

    session: str
    rank: Count
    error: str | None
    bytes: Count  # copied into live parameters
    seconds: Seconds  # spent in the loader
    pointers: str = ""  # checksum over the addresses of the parameters: they must never move


def raw(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, uint8 and 1-D; a view where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def checksum(data: Tensor) -> str:
    data = raw(data)
    return checksums(data, [(0, len(data))])[0]


def checksums(blob: Tensor, places: Sequence[tuple[int, int]]) -> list[str]:
    """Return the checksum of each place: XXH3-128, or on a GPU ``word_sum``.

    They find damage, not malice. The host waits for a GPU once, not once per place.

    Args:
        blob: uint8, 1-D.
        places: where each begins and ends.
    """
    if not places:
        return []
    if blob.is_cuda:
        sums = torch.stack([word_sum(blob[start:stop]) for start, stop in places]).tolist()
        return [f"sum64-{number % 2**64:016x}" for number in sums]
    memory = blob.numpy().data  # slicing it costs a tenth of slicing a tensor
    return [xxhash.xxh3_128_hexdigest(memory[start:stop]) for start, stop in places]


def word_sum(data: Tensor) -> Tensor:
    """Sum all words of 8 bytes, each scrambled with its place, modulo 2**64; int64 [].

    A GPU computes it at the speed of its memory, and a single changed word always shows.

    Args:
        data: uint8 [n].
    """
    if len(data) % 8 or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(-len(data) % 8)])
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for run, words in enumerate(data.view(torch.int64).split(WORDS)):
        place = torch.arange(run * WORDS, run * WORDS + len(words), device=data.device)
        total += _scrambled(_scrambled(words + place * MULTIPLIER)).sum()
    return total


def _scrambled(words: Tensor) -> Tensor:
    """Scramble each word, one to one. The mask makes torch's arithmetic shift a logical one."""
    return (words ^ ((words >> 29) & (2**35 - 1))) * MULTIPLIER


def lay_out(parts: Iterable[Shard]) -> tuple[list[Piece], int]:
    """Lay ``parts`` out one after another; return pieces without checksums and the blob's size."""
    pieces, offset = [], 0
    for part in parts:
        dtype = str(part.value.dtype).removeprefix("torch.")
        shape = tuple(part.value.shape)
        piece = Piece(part.name, dtype, shape, part.dim, part.start, offset, checksum="")
        pieces.append(piece)
        offset = aligned(offset + piece.bytes)
    return pieces, offset


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


class Room:
    """Memory of a blob, handed out in the order of ``lay_out`` so that ``fill`` need not copy."""

    def __init__(self, memory: Tensor | None) -> None:
        """
        Args:
            memory: uint8, 1-D; None where blobs are not made in place.
        """
        self._memory, self._end = memory, 0

    def place(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return memory for the blob's next tensor; None where there is no room for it."""
        start, size = self._end, math.prod(shape) * dtype.itemsize
        if self._memory is None or start + size > len(self._memory):
            return None
        self._end = aligned(start + size)
        return self._memory[start : start + size].view(dtype).view(shape)


def fill(blob: Tensor, pieces: Sequence[Piece], tensors: Sequence[Tensor]) -> tuple[Piece, ...]:
    """Copy tensors to their places in a blob (uint8, 1-D); return the pieces with checksums.

    A tensor that was made in a ``Room`` over the same bytes lies in its place already.
    """
    start = blob.data_ptr()
    for piece, tensor in zip(pieces, tensors, strict=True):
        if tensor.data_ptr() != start + piece.offset:
            piece_of(blob, piece).copy_(tensor)
    sums = checksums(blob, [piece.place for piece in pieces])
    if blob.is_cuda:
        # Nobody else waits for this stream: neither other processes nor our other streams.
        torch.cuda.current_stream(blob.device).synchronize()
    return tuple(
        msgspec.structs.replace(piece, checksum=digest)
        for piece, digest in zip(pieces, sums, strict=True)
    )


def piece_of(blob: Tensor, piece: Piece) -> Tensor:
    """Return the piece's tensor, as a view into the blob's bytes (uint8, 1-D)."""
    start, stop = piece.place
    data = blob[start:stop]
    return data.view(getattr(torch, piece.dtype)).view(piece.shape)


class _Inline:
    """Pickles as a call that SGLang's restricted unpickler allows and that makes a small tensor."""

    def __reduce__(self) -> tuple:
        return torch.ByteTensor, ([0],)


def encoded(blobs: Iterable[Blob]) -> bytes:
    """Return a message's blobs as they travel, once for all engine ranks that get them.

    Names and shapes repeat, so a fifth of the bytes is left; hundreds of ranks may get a copy.
    """
    return zlib.compress(msgspec.json.encode(tuple(blobs)), level=1)


def payload(message: Message, blobs: bytes = b"") -> str:
    """Return one rank's entry of ``serialized_named_tensors``, as SGLang takes it.

    SGLang wants a pickled list of (name, tensor). The name is our message; the tensor means
    nothing.

    Args:
        blobs: the result of ``encoded``, sent in place of ``message.blobs``.
    """
    message = msgspec.structs.replace(message, packed=blobs)
    return base64.b64encode(pickle.dumps([(message.to_json(), _Inline())])).decode()


def message_in(serialized: str) -> Message:
    """Return the message in a ``payload``; the pickle is only read, never unpickled.

    Raises:
        ConfigError: there is no valid message in it.
    """
    try:
        words = pickletools.genops(base64.b64decode(serialized, validate=True))
        content = next((word for _, word, _ in words if isinstance(word, str)), "")
    except (binascii.Error, TypeError, ValueError):
        content = ""
    return Message.from_json(content)
