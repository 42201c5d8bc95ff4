"""The time of day for measurements, monotonic even if somebody sets the clock."""

import time
import timeit
from collections.abc import Callable

_EPOCH = time.time() - time.monotonic()


def now() -> float:
    """Return Unix seconds, by the clock as it stood when this process began."""
    return _EPOCH + time.monotonic()


def shortest_ms(body: Callable[[], None], repeats: int) -> float:
    """Return the time of the fastest call, after one that warms up."""
    body()
    return 1e3 * min(timeit.repeat(body, repeat=repeats, number=1))
