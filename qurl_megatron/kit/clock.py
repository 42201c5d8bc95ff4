"""The time of day for measurements: it goes on evenly, whoever sets the clock."""

import time
import timeit
from collections.abc import Callable

_EPOCH = time.time() - time.monotonic()


def now() -> float:
    """Return Unix seconds, by the clock as it stood when this process began."""
    return _EPOCH + time.monotonic()


def shortest_ms(body: Callable[[], None], repeats: int) -> float:
    """Time the fastest of some calls: others may use the device, and a GPU's first is slow."""
    body()
    return 1e3 * min(timeit.repeat(body, repeat=repeats, number=1))
