"""Waiting for what happens by itself, however busy the machine is.

What must not wait for something has that take ``NEVER_S``: so it shows, and needs no fast machine.
"""

import inspect
import time
from collections.abc import Callable

PATIENCE_S = 120.0  # for what takes seconds on a quiet machine
NEVER_S = 600.0


class Clock:
    """Real time, and the seconds that a test skips."""

    skipped_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skipped_s


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """
    Raises:
        AssertionError: it never came to be; the message has the source of the condition.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"never within {seconds:g} s: {_source(condition)}"
        time.sleep(0.01)


def _source(condition: Callable[[], object]) -> str:
    """The lines that make it, as one."""
    try:
        return " ".join(inspect.getsource(condition).split())
    except (OSError, TypeError):  # of no file, or no function
        return repr(condition)
