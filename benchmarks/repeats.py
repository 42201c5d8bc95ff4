"""Repeats that can be compared: candidates in turns, beside a yardstick.

A machine is never quite the same twice: others use it. Beside every repeat stands the
**yardstick**, the seconds of a short piece of work that never changes. Where it takes longer than
it can, something else used the machine, and the repeat does not measure us.
"""

import hashlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from qurl_megatron.bench.record import in_turns

ANOTHER_LOAD = "another load"

LOADED = 1.25
"""The machine counts as loaded where the median yardstick takes so many times its shortest."""

PIECE = bytes(1 << 20)
PIECES = 10

T = TypeVar("T")


@dataclass
class Repeats(Generic[T]):
    """Seconds and results of one candidate, a value per round."""

    seconds: list[float] = field(default_factory=list)
    results: list[T] = field(default_factory=list)  # the candidate's return values
    yardsticks: list[float] = field(default_factory=list)  # seconds

    @property
    def reasons(self) -> list[str]:
        """``ANOTHER_LOAD`` where more than half of the yardsticks are clearly above the shortest
        that this process has seen."""
        if not self.yardsticks:
            return []
        shortest = min(*self.yardsticks, _Shortest.seconds)
        loaded = statistics.median(self.yardsticks) > LOADED * shortest
        return [ANOTHER_LOAD] if loaded else []


def interleaved(
    candidates: Mapping[str, Callable[[], T]],
    *,
    repeats: int,
    measure: Callable[[], float] | None = None,
    seen: Callable[[str, T], object] | None = None,
) -> dict[str, Repeats[T]]:
    """Call all candidates ``repeats`` times, after a round that does not count.

    Args:
        measure: seconds of fixed work, called right before and after each call; the mean is
            kept. Default: ``yardstick``.
        seen: called with the name and result of each call that counts, e.g. to show progress.
    """
    measure = measure or yardstick

    def timed(candidate: Callable[[], T]) -> tuple[float, T, float]:
        before = measure()
        start = time.perf_counter()
        result = candidate()
        seconds = time.perf_counter() - start
        return seconds, result, (before + measure()) / 2

    def seen_result(name: str, turn: tuple[float, T, float]) -> None:
        if seen:
            seen(name, turn[1])

    turns = {name: partial(timed, candidate) for name, candidate in candidates.items()}
    measured = in_turns(turns, repeats=repeats, warm_up=1, seen=seen_result)
    return {name: Repeats(*map(list, zip(*rows, strict=True))) for name, rows in measured.items()}


class _Shortest:
    """The shortest yardstick of this process: the machine's speed when it is left alone."""

    seconds = float("inf")


def yardstick() -> float:
    """Return the seconds of hashing a MiB on one core, about 1 ms: the shortest of ten.

    Hashing is arithmetic in registers and the first cache, and shows how fast the machine is at
    all: its clock, and its share of the host. Copies in memory, and Python, vary by a quarter from
    one second to the next on a machine that does nothing else. It needs no torch: a parent that
    measures its children's memory stays small.
    """
    pieces = []
    for _ in range(PIECES):
        start = time.perf_counter()
        hashlib.sha256(PIECE).digest()
        pieces.append(time.perf_counter() - start)
    _Shortest.seconds = min(_Shortest.seconds, *pieces)
    return min(pieces)
