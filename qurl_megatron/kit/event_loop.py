"""``asyncio.run`` that never waits for a name server.

A look-up cannot be cancelled, and asyncio waits for its threads when the loop ends. So here each
look-up has a thread that neither the loop nor the interpreter waits for.
"""

import asyncio
import functools
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")

_STARTING = threading.Lock()


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run ``main`` on an event loop of its own, wait for its threads, and return its result."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)


def run_shared(main: Coroutine[Any, Any, Result]) -> Result:
    """Run ``main`` on a loop that all threads share until the process ends, so that it can keep
    connections."""
    with _STARTING:
        loop = _shared()
    future = asyncio.run_coroutine_threadsafe(main, loop)
    try:
        return future.result()
    finally:
        future.cancel()  # nobody waits any more


@functools.cache
def _shared() -> asyncio.AbstractEventLoop:
    loop = _Loop()
    threading.Thread(target=loop.run_forever, name="requests", daemon=True).start()
    return loop


class _Loop(asyncio.SelectorEventLoop):
    async def getaddrinfo(
        self, host: str | bytes | None, port: str | bytes | int | None, **hints: int
    ) -> list[tuple]:
        addresses: Future[list[tuple]] = Future()
        addresses.set_running_or_notify_cancel()  # from here on it cannot be cancelled

        def look_up() -> None:
            try:
                addresses.set_result(socket.getaddrinfo(host, port, **hints))
            except UnicodeError:  # no name has such a part
                addresses.set_exception(socket.gaierror(socket.EAI_NONAME, "Name not known"))
            except Exception as error:  # for whoever waits
                addresses.set_exception(error)

        threading.Thread(target=look_up, name="look-up", daemon=True).start()
        return await asyncio.wrap_future(addresses, loop=self)
