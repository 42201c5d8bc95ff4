"""``asyncio.run`` that never waits for a name server.

Nothing can end a look-up that is under way. asyncio does it in the same threads as all other work
that blocks, and waits for all of them when its loop ends, whatever limit the caller was given. So
here each has a thread that neither the loop nor the interpreter waits for.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run ``main`` on an event loop of its own and return its result; work ``to_thread`` is waited
    for."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)


class Background:
    """An event loop on a thread of its own, which callers that block share: what one of them has
    opened there, such as a connection, is there for the next.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0
        self._starting = threading.Lock()

    def run(self, main: Coroutine[Any, Any, Result]) -> Result:
        """What ``main`` returns; it is cancelled where the caller is interrupted."""
        future = asyncio.run_coroutine_threadsafe(main, self._running())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None or self._process != os.getpid():  # threads do not survive a fork
                self._loop, self._process = _Loop(), os.getpid()
                threading.Thread(
                    target=self._loop.run_forever, name="requests", daemon=True
                ).start()
            return self._loop


class _Loop(asyncio.SelectorEventLoop):
    async def getaddrinfo(
        self,
        host: str | bytes | None,
        port: str | bytes | int | None,
        *,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> list[tuple]:
        addresses: Future[list[tuple]] = Future()
        addresses.set_running_or_notify_cancel()  # who gives up waits no more, and cancels nothing

        def look_up() -> None:
            try:
                addresses.set_result(socket.getaddrinfo(host, port, family, type, proto, flags))
            except Exception as error:  # for whoever waits
                addresses.set_exception(error)

        threading.Thread(target=look_up, name="look-up", daemon=True).start()
        return await asyncio.wrap_future(addresses, loop=self)
