"""A name server that is silent: what asks it for ``localhost`` is not answered."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.waiting import NEVER_S


@contextmanager
def unanswered(seconds: float = NEVER_S) -> Iterator[None]:
    """Until the end of the block; what waits for it nevertheless goes on after ``seconds``."""
    known, over = socket.getaddrinfo, threading.Event()

    def resolve(host, *arguments, **options):
        if host in (b"localhost", "localhost"):
            over.wait(seconds)
        return known(host, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", resolve)
        try:
            yield
        finally:
            over.set()
