"""Names of weight versions in engines: the number and the run's token, "12@9f86d081".

In the middle of an update it is "updating-12@9f86d081". A run keeps its token when it is started
again in its folder, and no other run has it, so an answer from another run's weights is told apart.
"""

import re
from dataclasses import dataclass
from enum import Enum

UNKNOWN_VERSION = -1  # weights that an engine started with, under a name that no run gave


class Mixed(Enum):
    """Weights in the middle of an update."""

    MIXED = "mixed"


MIXED = Mixed.MIXED
_NAME = re.compile(r"(updating-)?([0-9]{1,15})(?:@([0-9a-f]{1,64}))?")


@dataclass(frozen=True)
class Names:
    """The names of one run's versions."""

    token: str  # hexadecimal; "" reads the names of all runs alike, for a reader that only looks

    def of(self, version: int) -> str:
        return f"{version}@{self.token}"

    def updating(self, version: int) -> str:
        """Return the name while weights are of two versions."""
        return f"updating-{self.of(version)}"

    def number(self, name: object) -> int | Mixed | None:
        """Return a name's version, UNKNOWN_VERSION if no run gave it, None if another run did."""
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            return UNKNOWN_VERSION
        updating, number, token = match.groups()
        if self.token and token != self.token:
            return None if token else UNKNOWN_VERSION
        return MIXED if updating else int(number)
