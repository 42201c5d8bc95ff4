"""An item to score, and its score: a finite number, or the reason why there is none.

Scores come from code and servers that nobody has seen before. All go through ``as_score``, in the
worker and again where its answer is read, so no NaN gets to the policy.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from qurl_megatron.config.sections import LARGEST_SCORE
from qurl_megatron.kit.errors import Unscored, unscored


@dataclass(frozen=True)
class Item:
    """One response, with everything a reward may know of its question."""

    prompt: str
    response: str
    answer: str
    metadata: dict[str, Any]
    failure: Unscored | None = None  # known beforehand: nothing is asked for a score

    @property
    def given(self) -> dict[str, Any]:
        """The fields that a reward gets."""
        return {
            "prompt": self.prompt,
            "response": self.response,
            "answer": self.answer,
            "metadata": finite(self.metadata),
        }

    @property
    def line(self) -> str:
        """As JSON on one line of ASCII."""
        return json.dumps([*self.given.values()], default=str)


def finite(value: Any) -> Any:
    """Replace NaN and infinities by None: gaps of tables, for which JSON has no word."""
    if isinstance(value, dict):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


Score = float | Unscored


def as_score(value: Any) -> Score:
    """Return any real number as a float; booleans are 1.0 and 0.0, text is no number."""
    try:
        score = None if isinstance(value, str | bytes | bytearray) else float(value)
    except Exception:  # __float__ may be anybody's
        score = None
    if score is None:
        description = "null" if value is None else f"a value of type {type(value).__name__}"
        return unscored("invalid", description)
    if not abs(score) <= LARGEST_SCORE:  # NaN is not, either
        return Unscored("invalid", f"{score:g}")
    return score
