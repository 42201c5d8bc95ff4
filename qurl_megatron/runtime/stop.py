"""A person, a batch system or a closed session asks a run to stop."""

import os
import signal

from qurl_megatron.runtime.launch import stopping


class StopRequest:
    """True after Ctrl-C, SIGTERM or SIGHUP: the loop then saves and leaves at the next safe point.

    A second signal ends the process at once, but not a SIGHUP: where a session is closed, the shell
    sends one and the kernel another.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        for number in stopping():
            signal.signal(number, self._receive)

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def by(self) -> str:
        """What asked for it, for a person; "": nobody has."""
        if self.signal is None:
            return ""
        return "Ctrl-C" if self.signal == signal.SIGINT else signal.Signals(self.signal).name

    def _receive(self, number: int, _frame) -> None:
        if self.signal is not None:
            if number == signal.SIGHUP:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = number
