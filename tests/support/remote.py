"""Objects that live in processes of their own, called from the test: for what dies and stops."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from tests.support.waiting import PATIENCE_S

CONTEXT = multiprocessing.get_context("forkserver")


class Remote:
    """``make(*args)`` in a fresh process; ``start`` a method there, then take its ``result``."""

    def __init__(self, make: Callable, *args) -> None:
        CONTEXT.set_forkserver_preload(["qurl_megatron.wire.group"])
        self._pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self.process.start()
        theirs.close()
        self.result()  # ready: what is timed later is not the start

    def start(self, method: str, *args) -> "Remote":
        self._pipe.send((method, args))
        return self

    def result(self):
        assert self._pipe.poll(PATIENCE_S), "no answer"
        done, value = self._pipe.recv()
        if not done:
            raise value
        return value

    def call(self, method: str, *args):
        return self.start(method, *args).result()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


def together(remotes: list[Remote], method: str, *args) -> list:
    """The same call on all of them at once."""
    for remote in remotes:
        remote.start(method, *args)
    with ThreadPoolExecutor(len(remotes)) as pool:
        return list(pool.map(Remote.result, remotes))


def _serve(pipe: Connection, make: Callable, args: tuple) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    made = make(*args)
    pipe.send((True, None))
    with contextlib.suppress(EOFError):  # the test is over
        while True:
            method, arguments = pipe.recv()
            try:
                pipe.send((True, getattr(made, method)(*arguments)))
            except Exception as error:  # the test's to see
                pipe.send((False, error))
