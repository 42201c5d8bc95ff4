"""Which engines a batch system offers: a file of JSON lines, or a folder with one file per engine.

    {"url": "http://10.0.0.7:30000", "api_key_file": "key"}

What is written there joins the fleet, what is gone from there leaves it. A key file is looked up
beside the rendezvous, so that both can live in one folder that only the user can read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.record import Malformed, decode

Part = TypeVar("Part")


@dataclass(frozen=True)
class Member:
    url: str
    api_key_file: Path | None
    place: str = ""  # file, or file and line, of its entry

    def api_key(self) -> str | None:
        """
        Raises:
            ConfigError: the key file cannot be read.
        """
        if self.api_key_file is None:
            return None
        try:
            return self.api_key_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:  # the latter: no text, or no name of a file
            raise ConfigError(f"the API key of {self.url} cannot be read: {error}") from None


class _Entry(msgspec.Struct, frozen=True):
    url: Annotated[str, Meta(pattern="^https?://")]
    api_key_file: str | None = None


class WrongEntry(ConfigError):
    """An entry that is malformed or cannot be read; whose it was is not known."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


def read_members(rendezvous: Path, wrong: Callable[[WrongEntry], None]) -> dict[str, Member]:
    """The engines offered now, by URL; none where there is nothing yet.

    Args:
        wrong: gets an error for each such entry. (A writer may be in the middle of it: ask again
            before believing it.)

    Raises:
        ConfigError: a file of JSON lines cannot be read.
    """

    def read(act: Callable[..., Part | None], *place: object) -> Part | None:
        try:
            return act(*place)
        except WrongEntry as error:
            wrong(error)
            return None

    if rendezvous.is_dir():
        files = sorted(rendezvous.glob("*.json"))
        lines = [(str(file), text) for file in files if (text := read(_text, file)) is not None]
    else:
        text = _text(rendezvous) or ""
        lines = [
            (f"{rendezvous}, line {number}", line)
            for number, line in enumerate(text.splitlines(), start=1)
            if line.strip()
        ]
    folder = rendezvous if rendezvous.is_dir() else rendezvous.parent
    members = [read(_member, place, line, folder) for place, line in lines]
    return {member.url: member for member in members if member is not None}


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:  # not written yet, or its engine has just left
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise WrongEntry(f"rendezvous {file} cannot be read: {error}", str(file)) from None


def _member(where: str, text: str, folder: Path) -> Member:
    try:
        entry = decode(_Entry, text)
    except Malformed as error:
        raise WrongEntry(
            f'rendezvous {where} is not {{"url": ..., "api_key_file": ...}}: {error}', where
        ) from None
    key_file = entry.api_key_file
    return Member(entry.url.rstrip("/"), folder / key_file if key_file else None, where)
