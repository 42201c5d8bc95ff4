"""A few words of whatever came from outside, for a sentence."""

import reprlib

LONGEST = 200

_REPR = reprlib.Repr()
_REPR.maxother = _REPR.maxstring = LONGEST


def shortened(value: object) -> str:
    """Texts as they are, anything else as Python writes it; neither longer than it must be."""
    text = value if isinstance(value, str) else _REPR.repr(value)
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
