"""Imports that come first in a fork server, so that it starts and leaves sooner.

It does nothing but import and fork. Garbage is looked for in the processes that it forks alone, and
not among the objects that they have from it, whose pages they share for longer. When nobody needs
it any more it leaves without taking torch apart.

A signal to a whole process group reaches it, too. The launcher passes it on to the ranks, which are
in groups of their own; a fork server that ended by it would take them along, unsaved.
"""

import atexit
import gc
import os
import signal

SERVER = os.getpid()
OUTLIVED = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
"""And their handlers in a process that it forks: `nohup` has SIGHUP ignored."""


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
