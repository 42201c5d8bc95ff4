"""Repeats that can be compared: candidates in turns, forwards and backwards, beside a yardstick.

A machine is never quite the same twice: it warms up, and others use it. So candidates are
measured one after another in rounds, each round in the opposite order of the last (A B, B A, ...),
which gives a slow drift to all alike. Beside every repeat stands the **yardstick**, the seconds of
a short piece of work that never changes. Where the yardstick takes longer than it can, something
else used the machine, and the repeat is no measurement of ours.
"""

import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Generic, TypeVar

LOADED = 1.25
"""The machine counts as loaded where the median yardstick takes so many times its shortest."""

PIECE = bytes(1 << 20)
PIECES = 10
"""The shortest of so many counts: threads of what was measured may still spin for a while."""

T = TypeVar("T")


@dataclass
class Repeats(Generic[T]):
    """What came of one candidate, a value per round."""

    seconds: list[float] = field(default_factory=list)
    results: list[T] = field(default_factory=list)  # what the candidate returned
    yardsticks: list[float] = field(default_factory=list)  # seconds

    @property
    def reasons(self) -> list[str]:
        """Of ``record.REASONS``."""
        return load_reasons(self.yardsticks)


def interleaved(
    candidates: Mapping[str, Callable[[], T]],
    *,
    repeats: int,
    warm_up: int = 1,
    measure: Callable[[], float] | None = None,
    seen: Callable[[str, T], object] | None = None,
) -> dict[str, Repeats[T]]:
    """Call all candidates ``repeats`` times, in rounds of alternating order.

    Args:
        warm_up: rounds before those that count.
        measure: seconds of fixed work, called right before and after each call; the mean is
            kept. Default: ``yardstick``.
        seen: told of each call that counts, e.g. to show how far it is.
    """
    measure = measure or yardstick
    names = list(candidates)
    found: dict[str, Repeats[T]] = {name: Repeats() for name in names}
    for number in range(-warm_up, repeats):
        for name in names if number % 2 == 0 else reversed(names):
            before = measure()
            start = time.perf_counter()
            result = candidates[name]()
            seconds = time.perf_counter() - start
            if number < 0:
                continue
            mine = found[name]
            mine.seconds.append(seconds)
            mine.results.append(result)
            mine.yardsticks.append((before + measure()) / 2)
            if seen:
                seen(name, result)
    return found


def load_reasons(yardsticks: Sequence[float]) -> list[str]:
    """["another load"] where more than half of the yardsticks are clearly above the shortest that
    this process has seen; a minority is what medians are for."""
    if not yardsticks:
        return []
    shortest = min(*yardsticks, _Shortest.seconds)
    return ["another load"] if statistics.median(yardsticks) > LOADED * shortest else []


class _Shortest:
    """The shortest yardstick of this process: what the machine can do when it is left alone."""

    seconds = float("inf")


def yardstick() -> float:
    """Seconds of hashing a MiB on each core at once, about 1 ms.

    It is arithmetic in registers and the first cache. Copies in memory, and Python, vary by a
    quarter from one second to the next on a machine that does nothing else. It needs no torch: a
    parent that measures its children's memory stays small.
    """
    seconds = min(_fixed_work() for _ in range(PIECES))
    _Shortest.seconds = min(_Shortest.seconds, seconds)
    return seconds


def _fixed_work() -> float:
    pool, cores = _workers()
    start = time.perf_counter()
    list(pool.map(hashlib.sha256, [PIECE] * cores))  # which lets other threads run meanwhile
    return time.perf_counter() - start


@cache
def _workers() -> tuple[ThreadPoolExecutor, int]:
    cores = min(len(os.sched_getaffinity(0)), 16)
    return ThreadPoolExecutor(cores, thread_name_prefix="yardstick"), cores


def progress(what: str) -> None:
    """A line on standard error: benchmarks take minutes, and standard output is for the table."""
    print(what, file=sys.stderr, flush=True)
