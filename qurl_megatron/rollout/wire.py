"""What a weight update says on the wire: pieces of tensors in blobs, blobs in buckets.

    bucket   one call to an engine, at most ``sync.bucket_mb`` of quantized bytes per training rank
      blob   what one training rank adds to it: a run of bytes, and where an engine finds them
        piece  the rows (or columns) ``[start, start + shape[dim])`` of one Hugging Face tensor

Nobody joins pieces into whole tensors: an engine rank copies the part of each piece that it needs
into its live parameters. The description travels as JSON inside the one argument that SGLang hands
to a custom weight loader; the bytes take the transport's own way, and are never unpickled.
"""

import base64
import json
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor

from qurl_megatron.errors import ConfigError

FORMAT = "qurl-update-1"
ALIGNMENT = 64  # bytes; pieces begin at multiples, so that any dtype can view them
Action = Literal["connect", "bucket", "check", "finish", "close"]


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
        return self.start + (1 if self.dim is None else self.shape[self.dim])


@dataclass(frozen=True)
class Blob:
    """One training rank's share of a bucket for one engine rank."""

    where: dict[str, Any]  # what the transport needs to find it
    bytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Message:
    """One call of the loader on one engine rank.

    ``connect`` opens the transport, ``bucket`` brings weights, ``check`` asks for a receipt,
    ``finish`` readies the parameters for SGLang's own post-processing, ``close`` ends the session.
    """

    action: Action
    session: str  # one publication to one engine; anything left of another is dropped
    version: int
    index: int = 0  # of a bucket; of ``check``: how many there were
    transport: dict[str, Any] = field(default_factory=dict)  # {"kind": "files" | "memory" | ...}
    blobs: tuple[Blob, ...] = ()

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)})

    @staticmethod
    def from_json(text: str) -> "Message":
        """
        Raises:
            ConfigError: not a message of this format.
        """
        try:
            raw = json.loads(text)
            if raw.pop("format", None) != FORMAT:
                raise ConfigError(f"the weight update is not of format {FORMAT}")
            blobs = tuple(
                Blob(
                    where=blob["where"],
                    bytes=blob["bytes"],
                    pieces=tuple(
                        Piece(**{**piece, "shape": tuple(piece["shape"])})
                        for piece in blob["pieces"]
                    ),
                )
                for blob in raw.pop("blobs")
            )
            return Message(**raw, blobs=blobs)
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ConfigError(f"the weight update is malformed: {error!r}") from None


@dataclass(frozen=True)
class Receipt:
    """What one engine rank says of a whole version: ``error`` is None where all of it arrived."""

    session: str
    rank: int
    error: str | None
    bytes: int  # copied into live parameters
    seconds: float  # spent in the loader
    pointers: str = ""  # checksum over the addresses of the parameters: they must never move

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Receipt":
        return Receipt(**json.loads(text))


def checksum(data: Tensor) -> str:
    """XXH3-128 of a contiguous CPU tensor's bytes: finds damage, not malice."""
    return xxhash.xxh3_128_hexdigest(data.view(torch.uint8).flatten().numpy())


def lay_out(parts: Iterable[tuple[str, Tensor, int | None, int]]) -> tuple[list[Piece], int]:
    """Places for ``(name, tensor, dim, start)`` in one blob, one after another.

    Returns:
        The pieces without checksums (those need the bytes on the host), and the blob's size.
    """
    pieces, offset = [], 0
    for name, tensor, dim, start in parts:
        dtype = str(tensor.dtype).removeprefix("torch.")
        piece = Piece(name, dtype, tuple(tensor.shape), dim, start, offset, "")
        pieces.append(piece)
        offset = -(-(offset + piece.bytes) // ALIGNMENT) * ALIGNMENT
    return pieces, offset


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
    meaning.
    """
    return [
        base64.b64encode(pickle.dumps([(message.to_json(), _Inline())])).decode()
        for message in messages
    ]
