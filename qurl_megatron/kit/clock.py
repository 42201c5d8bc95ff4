"""The time of day for measurements: it goes on evenly, whoever sets the clock."""

import time

_EPOCH = time.time() - time.monotonic()


def now() -> float:
    """Unix seconds, as the clock stood when this process began."""
    return _EPOCH + time.monotonic()
