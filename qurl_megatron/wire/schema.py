"""JSON from outside, field by field: every value in its range, or one Malformed that says which.

A range is a predicate, and a table of them describes an object.
"""

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from qurl_megatron.kit.errors import printable

Range = Callable[[Any], bool]
LONGEST = 200  # characters of outside text, in a sentence
LONGEST_BYTES = 1 << 16  # that are looked at for these
LARGEST = 1 << 48  # of counts and sizes: the product of some of them is still an ordinary number


class _Repr(reprlib.Repr):
    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(printable(x), level)  # while a key in it is whole


_REPR = _Repr()
_REPR.maxother = _REPR.maxstring = LONGEST


class Malformed(ValueError):
    """What came is not what it should be; says in which field."""


def shortened(value: object) -> str:
    """A few printable words of it: texts as they are, bytes as text, anything else as Python
    writes it."""
    if isinstance(value, bytes):
        value = value[:LONGEST_BYTES].decode(errors="replace")
    words = " ".join(printable(value if isinstance(value, str) else _REPR.repr(value)).split())
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 3]}..."


def text(value: Any) -> bool:
    return type(value) is str


def count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def flag(value: Any) -> bool:
    return type(value) is bool


def record(value: Any) -> bool:
    return type(value) is dict


def or_none(inner: Range) -> Range:
    return lambda value: value is None or inner(value)


def list_of(inner: Range) -> Range:
    return lambda value: type(value) is list and all(map(inner, value))


def map_of(inner: Range) -> Range:
    return lambda value: type(value) is dict and all(map(inner, value.values()))


def parse(content: str | bytes) -> Any:
    """
    Raises:
        Malformed: it is not JSON.
    """
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise Malformed(f"not JSON ({error})") from None


def fields(raw: Any, ranges: Mapping[str, Range]) -> dict[str, Any]:
    """The object itself.

    Raises:
        Malformed: it is not an object, has other fields than ``ranges``, or a value out of range.
    """
    if type(raw) is not dict:
        raise Malformed(f"{shortened(raw)} is not an object with {', '.join(ranges)}")
    if raw.keys() != ranges.keys():
        names = ", ".join(sorted(raw.keys() ^ ranges.keys()))
        raise Malformed(f"it lacks, or should not have, {shortened(names)}")
    for name, allowed in ranges.items():
        if not allowed(raw[name]):
            raise Malformed(f"{name} cannot be {shortened(raw[name])}")
    return raw
