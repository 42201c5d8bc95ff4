"""Files of JSON lines that grow while a run goes on: metrics, samples, timeline.

A crash leaves at most the last line torn. Readers pass over it, and a resumed run removes it
together with the lines of the steps that it does again.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.errors import ConfigError

T = TypeVar("T")

# What parsing raises for a line that a person, or the disk, has edited.
_EDITED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class Growing:
    """Appends to a file; each piece is there whole, or not at all where the disk is full."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, piece: bytes) -> None:
        """Append ``piece``.

        Raises:
            OSError: the system refused; the file is as it was before.
        """
        start = self._file.seek(0, os.SEEK_END)
        unwritten = memoryview(piece)
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError:
            self._file.truncate(start)
            raise

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path, parse: Callable[[str], T], kind: str) -> list[T]:
    """Return the parsed lines of a file; none where there is no file.

    Args:
        parse: turns a line into its value; raises ValueError or the like for a bad line.
        kind: what a line should be, for the error message.

    Raises:
        ConfigError: a line, other than a torn last one, is not of this kind.
    """
    return [value for _, value in _parsed_lines(path, parse, kind)]


def keep_lines(
    path: Path, parse: Callable[[str], T], kind: str, keep: Callable[[T], bool]
) -> list[T]:
    """Rewrite a file with the lines that ``keep`` accepts, and return their values.

    The file is the old one or the new one, never half; it is made, empty, where there is none.

    Raises:
        ConfigError: as ``read_lines``; the file is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [(line, value) for line, value in _parsed_lines(path, parse, kind) if keep(value)]
    write_whole(path, "".join(line + "\n" for line, _ in kept), sync=True)
    return [value for _, value in kept]


def _parsed_lines(path: Path, parse: Callable[[str], T], kind: str) -> list[tuple[str, T]]:
    if not path.is_file():
        return []
    # Not splitlines(): it also splits at characters that may stand inside a JSON string.
    *lines, last = path.read_text(encoding="utf-8", errors="replace").split("\n")
    parsed = []
    for number, line in enumerate(lines, 1):
        try:
            parsed.append((line, parse(line)))
        except _EDITED as error:
            raise ConfigError(
                f"{path}, line {number}, is not {kind}: {line[:80]!r}; fix or delete the line"
            ) from error
    with contextlib.suppress(*_EDITED):  # empty, or torn when the run was killed
        parsed.append((last, parse(last)))
    return parsed
