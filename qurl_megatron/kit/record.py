"""JSON from outside as typed records: every field present and in range, or one Malformed.

A record is a ``Record`` with annotated fields; ``Count`` and ``Seconds`` carry their ranges::

    class Answer(Record, frozen=True):
        tokens: Count
        label: str | None = None

    answer = decode(Answer, content)

Nothing is coerced: a bool is no integer, NaN and infinity are no numbers, and a field that the
record does not have is an error.
"""

import reprlib
import sys
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from qurl_megatron.kit.errors import printable

LONGEST = 200  # characters of outside text that a sentence quotes
LONGEST_BYTES = 1 << 16  # of outside bytes that are looked at for these
LARGEST = 1 << 48  # counts and sizes: the product of some of them is still an ordinary number

Count = Annotated[int, Meta(ge=0, le=LARGEST)]
Seconds = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Value = TypeVar("Value")


class Malformed(ValueError):
    """Outside data of the wrong form; the message names the field."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object whose fields are checked when it is decoded."""


def decode(kind: type[Value], content: Any, *, packed: bool = False) -> Value:
    """Parse JSON, or MessagePack (``packed``); raise ``Malformed`` unless it is of this type."""
    try:
        if packed:
            return msgspec.msgpack.decode(content, type=kind)
        return msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, a wrong field; too deep
        raise Malformed(shortened(str(error))) from None


def convert(kind: type[Value], value: Any) -> Value:
    """Check a parsed value; raise ``Malformed`` unless it is of this type."""
    try:
        return msgspec.convert(value, kind)
    except (ValueError, RecursionError) as error:
        raise Malformed(shortened(str(error))) from None


class _Repr(reprlib.Repr):
    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(printable(x), level)  # before it is cut: half a key is not found


_REPR = _Repr()
_REPR.maxother = _REPR.maxstring = LONGEST


def shortened(value: object) -> str:
    """Return a few printable words: text as it is, bytes decoded, anything else as its repr."""
    if isinstance(value, bytes):
        value = value[:LONGEST_BYTES].decode(errors="replace")
    if not isinstance(value, str):
        value = _REPR.repr(value)
    words = " ".join(printable(value).split())
    if len(words) > LONGEST:
        return f"{words[: LONGEST - 3]}..."
    return words
