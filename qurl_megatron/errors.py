"""Errors that are not ours.

``ConfigError`` is the one exception that means "the user can fix this": the CLI prints it and exits
with 2. ``Unscored`` is what a response has in place of a score.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CAUSES = {
    "timeouts": "took too long",
    "crashes": "ended the worker",
    "exceptions": "raised",
    "invalid": "got no finite number",
    "unanswered": "got no answer",
    "refused": "got no scores from the server",
    "environment": "failed in the environment",
}
"""Why a response has no score, by the metric below ``reward/`` that counts it."""

LONGEST_REASON = 300  # characters


class Foreseen(Exception):
    """What a run must expect, and says in a sentence.

    Raised where the leading rank acts, it is raised on every rank (``runtime.megatron.on_lead``),
    so that all of them save and end, or go on. Anything else is a mistake of ours.
    """


class Interrupted(Foreseen):
    """Somebody asked for a stop; what was under way has been given up."""


class ConfigError(Foreseen, ValueError):
    """Bad input from outside: a recipe, a checkpoint, a data file.

    The message is one sentence that names the key, file, tensor or shape, the value found, and the
    fix.
    """


class Unreadable(ConfigError):
    """The system cannot read a file, which says nothing about what is in it."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """
    Raises:
        Unreadable: the system cannot read the file; one that is missing is left to the caller.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unreadable(f"{path} cannot be read ({error.strerror})") from None


@dataclass(frozen=True, slots=True)
class Unscored:
    """In place of a score, or of what an environment says next."""

    cause: str  # of CAUSES
    why: str


def unscored(cause: str, why: str) -> Unscored:
    """With a reason that fits on a line of a terminal, and does nothing to it."""
    why = "".join(c if c.isprintable() else "?" for c in " ".join(why.split()))
    return Unscored(cause, why if len(why) <= LONGEST_REASON else f"{why[: LONGEST_REASON - 3]}...")
