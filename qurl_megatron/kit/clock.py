"""The time of day for measurements: it goes on evenly, whoever sets the clock."""

import time
from collections.abc import Callable

_EPOCH = time.time() - time.monotonic()


def now() -> float:
    """Unix seconds, as the clock stood when this process began."""
    return _EPOCH + time.monotonic()


def shortest_ms(body: Callable[[], None], repeats: int) -> float:
    """Time the fastest of some calls: others may use the device, and a GPU's first is slow."""
    body()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        body()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)
