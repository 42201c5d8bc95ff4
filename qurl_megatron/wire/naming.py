"""Names of the weights that engines have: a version's number and whose it is, "12@9f86d081".

In the middle of an update it is "updating-12@9f86d081". The part behind the @ is the token of a
run: the same each time it is started again in its folder, and another for every other run. So no
answer from another run's weights passes for one of this run.
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
        """While weights are of two versions."""
        return f"updating-{self.of(version)}"

    def number(self, name: object) -> int | Mixed | None:
        """The version of that name, UNKNOWN_VERSION where no run gave it, or None: another's."""
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            return UNKNOWN_VERSION
        updating, number, token = match.groups()
        if self.token and token != self.token:
            return None if token else UNKNOWN_VERSION
        return MIXED if updating else int(number)
