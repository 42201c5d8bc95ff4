"""Standard output that goes away: its reader has left (``| head``), its session was closed, or it
is a file on a full disk.

A command whose results are on disk goes on without it, and says so once on stderr; any other ends,
as Unix tools do. The loss of standard error ends nothing.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

GONE = {errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT}
READER_LEFT = 128 + signal.SIGPIPE
"""Exit code of a command whose reader has left: as a shell reports SIGPIPE."""


@contextmanager
def terminal(*, lasting: bool) -> Iterator["Output"]:
    """Inside, sys.stdout and sys.stderr may go away.

    Args:
        lasting: go on without sys.stdout. Else exit with 141 where its reader has left, and with 2
            and a sentence otherwise.
    """
    before = sys.stdout, sys.stderr
    output, errors = Output(sys.stdout, lasting=lasting), Output(sys.stderr, lasting=True)
    sys.stdout, sys.stderr = output, errors
    try:
        yield output
    finally:
        try:
            output.flush()
            errors.flush()
        finally:
            sys.stdout, sys.stderr = before


class Output:
    """A text stream that survives the loss of its reader."""

    def __init__(self, stream: TextIO, *, lasting: bool) -> None:
        self.lasting = lasting
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, act: Callable, *args: str) -> None:
        try:
            act(*args)
        except OSError as error:
            if error.errno not in GONE:
                raise
            # Its buffer has to be written somewhere, at the latest at exit.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self._without(error)

    def _without(self, error: OSError) -> None:
        reason = f"stdout cannot be written any more ({os.strerror(error.errno or 0)})"
        if self.lasting:
            # Where it was stderr that went away, nobody hears this.
            print(f"qurl: {reason}; the run goes on without it", file=sys.stderr, flush=True)
            return
        if error.errno == errno.EPIPE:
            sys.exit(READER_LEFT)
        print(f"qurl: {reason}", file=sys.stderr, flush=True)
        sys.exit(2)
