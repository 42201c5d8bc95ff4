"""Requests to stop a run, by a person, a batch system or a closed session."""

import os
import signal
import time
from collections.abc import Callable

from qurl_megatron.kit.launch import stopping

ONE_STOP_S = 5.0
"""Seconds in which repeated signals are one request: a rank gets a batch system's signal itself,
and again from its launcher."""
FOLLOWS_S = 2.0
"""Seconds by which a signal to the trainer may follow an engine's end, where both are signalled."""


class StopRequest:
    """True after Ctrl-C, SIGTERM or SIGHUP: the loop then saves and leaves at the next safe point.

    A second request ends the process at once, but not a SIGHUP: where a session is closed, the
    shell sends one and the kernel another.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0
        for number in stopping():
            signal.signal(number, self._receive)

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def by(self) -> str:
        """The reason for the stop, for a person; "" if there is none."""
        if self.signal is None:
            return ""
        if self.signal == signal.SIGINT:
            return "Ctrl-C"
        return signal.Signals(self.signal).name

    def _receive(self, number: int, _frame) -> None:
        if self.signal is not None:
            if number == signal.SIGHUP or time.monotonic() - self._since < ONE_STOP_S:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal, self._since = number, time.monotonic()


def stop_comes(stop: Callable[[], bool]) -> bool:
    """Return whether a stop is requested now or in a moment.

    Call it where engines are gone: a signal to all processes of a run may reach them first.
    """
    end = time.monotonic() + FOLLOWS_S
    while not stop() and time.monotonic() < end:
        time.sleep(0.05)
    return stop()
