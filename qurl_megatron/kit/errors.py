"""Errors that a run expects. ``ConfigError`` means "the user can fix this": the CLI prints it and
exits with 2. An ``Unscored`` takes the place of a response's score.
"""

import base64
import contextlib
import html
import re
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
SHORTEST_SECRET = 6  # characters; a shorter one would take ordinary words along

_SECRETS: dict[str, re.Pattern[str]] = {}
"""By key, the pattern that finds it in a text; the longest first, as a shorter one may be a part of
it."""
_BREAK = r"(?:(?:\\[nr]|[\x00-\x1f\x7f-\x9f])+ *)?"  # where a server wraps its lines
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # but tab and line feed
    r"\u2028-\u202e\u2066-\u2069"  # line separators; marks that turn the direction of writing
    r"\ud800-\udfff]"  # halves of characters, which no encoder takes
)


def keep_secret(value: str | None) -> None:
    """Have ``printable`` leave a key out from now on, whoever quotes it."""
    if value and len(value) >= SHORTEST_SECRET and value not in _SECRETS:
        written = [value, *_as_base64(value)]
        _SECRETS[value] = re.compile(
            "|".join(_BREAK.join(map(_spelled, spelling)) for spelling in written)
        )
        for secret in sorted(_SECRETS, key=len, reverse=True):
            _SECRETS[secret] = _SECRETS.pop(secret)


def _spelled(character: str) -> str:
    """Return a pattern of a character by itself, in a URL, in JSON, in HTML or in Python."""
    code, plain = ord(character), re.escape(character)
    escaped = [plain]
    if character in "\"'/\\":
        escaped = [rf"\\*{plain}"]
    if not character.isalnum():
        escaped += [rf"(?i:%{code:02x}|\\u{code:04x}|&#0*{code};|&#x0*{code:x};)"]
        if character in "&<>\"'":
            escaped.append(html.escape(character))
        escaped += {"+": ["-"], "/": ["_"], " ": [r"\+"]}.get(character, [])
    return f"(?:{'|'.join(escaped)})"


def _as_base64(value: str) -> list[str]:
    """Return the forms of a key in Base64 behind any text, as in ``Basic`` credentials.

    Its first and last character may hold bits of its neighbours, and are left out.
    """
    encoded = (base64.b64encode(bytes(before) + value.encode()).decode() for before in range(3))
    wholes = ((8 * (before + len(value.encode()))) // 6 for before in range(3))
    starts = (0, 2, 3)
    return [text[a:b] for text, a, b in zip(encoded, starts, wholes, strict=True)]


def printable(text: str) -> str:
    """Return text from outside so that a terminal, a log or a page can take it.

    Control characters (but line ends and tabs), halves of characters and what changes the direction
    of writing become "?"; keys given to ``keep_secret`` become "***", also where a server wraps,
    escapes or encodes them. All text that was not written here passes through this function before
    anybody sees it, and before it is cut: half a key would not be recognized.
    """
    for secret in _SECRETS.values():
        text = secret.sub("***", text)
    return _CONTROLS.sub("?", text)


class Foreseen(Exception):
    """An error that a run must expect, and reports in a ``printable`` sentence.

    Raised where the leading rank acts, it is raised on every rank (``actor.megatron.on_lead``),
    so that all of them save and end, or go on. Any other exception is a bug.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class Interrupted(Foreseen):
    """A stop was requested, and the work under way abandoned."""


class ConfigError(Foreseen, ValueError):
    """Bad input from outside: a recipe, a checkpoint, a data file.

    The message is one sentence that names the key, file, tensor or shape, the value found, and the
    fix.
    """


class Unreadable(ConfigError):
    """This system or version cannot read a file, which may be sound."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise ``Unreadable`` where the system cannot read a file; let ``FileNotFoundError`` pass."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unreadable(f"{path} cannot be read ({error.strerror})") from None


@dataclass(frozen=True, slots=True)
class Unscored:
    """Stands in for a score, or for an environment's next message."""

    cause: str  # of CAUSES
    why: str


def unscored(cause: str, reason: str) -> Unscored:
    """Return an ``Unscored`` whose reason is printable and fits on a line of a terminal."""
    reason = " ".join(printable(reason).split())
    if len(reason) > LONGEST_REASON:
        reason = f"{reason[: LONGEST_REASON - 3]}..."
    return Unscored(cause, reason)
