"""Files as disks, copies and people leave them: valid ones, damaged in ways hypothesis finds."""

import json
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=8)
    | st.sampled_from(["..", "/etc/passwd", "a\0b", -1, 2**70, 1e999, "\ud800", "NaN", "[" * 50])
    | st.sampled_from(["int8", "float32", "dtype", "check", "http://a", "7@abc", 10**400, 4, 1.0]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
"""Any value that a JSON file can hold, NaN and half characters included."""


def examples(count: int):
    """So many examples, the same ones each time."""
    return settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def damaged_bytes(draw: Any, content: bytes) -> bytes:
    """A file with bytes changed, cut out, doubled or put in at some places, or cut off."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        many = draw(st.integers(1, 16))
        kind = draw(st.sampled_from(["change", "cut", "double", "insert", "end"]))
        if kind == "change":
            data[at : at + many] = draw(st.binary(min_size=many, max_size=many))
        elif kind == "cut":
            del data[at : at + many]
        elif kind == "double":
            data[at:at] = data[at : at + many]
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=many, max_size=many))
        else:
            del data[at:]
    return bytes(data)


@st.composite
def damaged_json(draw: Any, document: Any) -> bytes:
    """A JSON document with some value replaced by any other, left out, or joined by a stranger."""
    document = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 2))):
        places = list(_places(document))
        if not places:
            break
        holder, key = draw(st.sampled_from(places))
        kind = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if kind == "replace":
            holder[key] = draw(JSON)
        elif kind == "remove":
            del holder[key]
        elif isinstance(holder, dict):
            holder[draw(st.text(max_size=6))] = draw(JSON)
        else:
            holder.append(draw(JSON))
    return json.dumps(document).encode("utf-8", "surrogatepass")


def damaged(document: Any) -> st.SearchStrategy[bytes]:
    """A JSON document that is damaged as a document, or as a file."""
    return damaged_json(document) | damaged_bytes(json.dumps(document).encode())


def _places(document: Any):
    """Every (list or dict, key) inside a document."""
    keys = document if isinstance(document, dict) else range(len(document))
    for key in list(keys):
        yield document, key
        if isinstance(document[key], dict | list):
            yield from _places(document[key])
