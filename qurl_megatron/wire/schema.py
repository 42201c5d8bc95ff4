"""JSON from outside, field by field: every value in its range, or one Malformed that says which.

A range is a predicate, and a table of them describes an object.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from qurl_megatron.kit.record import LARGEST
from qurl_megatron.kit.record import Malformed as Malformed
from qurl_megatron.kit.record import shortened as shortened

Range = Callable[[Any], bool]


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
