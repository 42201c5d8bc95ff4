"""Waiting for what happens by itself, however busy the machine is.

What must not wait for something has that take ``NEVER_S``: so it shows, and needs no fast machine.
"""

import time
from collections.abc import Callable

PATIENCE_S = 120.0  # for what takes seconds on a quiet machine
NEVER_S = 600.0


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.01)
