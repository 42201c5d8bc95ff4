"""The first import of a fork server, which does nothing but import and fork.

Garbage is collected in forked processes alone, and not among inherited objects, so that their pages
stay shared. At its end the server exits at once, without tearing torch down.

A signal to the whole process group reaches it, too. It must outlive that: the launcher passes the
signal on to the ranks, which would die with the server, unsaved.
"""

import atexit
import gc
import os
import signal

SERVER = os.getpid()
OUTLIVED = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
"""Signals that the server outlives, with the handlers that a forked process gets back: under
`nohup` SIGHUP is ignored."""


def _outlive_signals() -> None:
    if os.getpid() == SERVER:  # from the first fork on: until then there is nothing to lose
        for number in OUTLIVED:
            signal.signal(number, signal.SIG_IGN)


def _begin() -> None:
    gc.freeze()
    gc.enable()
    if os.getppid() == SERVER:
        for number, handler in OUTLIVED.items():
            signal.signal(number, handler)


gc.disable()
os.register_at_fork(before=_outlive_signals, after_in_child=_begin)
atexit.register(os._exit, 0)
# Ctrl-C while it imports is not worth a traceback; each rank sets a handler of its own.
signal.signal(signal.SIGINT, signal.SIG_DFL)
