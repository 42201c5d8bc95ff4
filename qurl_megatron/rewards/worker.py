"""The process that checks answers: one JSON line in, one out. Started by ``rewards.pool``.

It imports no torch, ignores Ctrl-C (that is for the trainer), and cannot outlive its trainer by
more than one check.
"""

import json
import logging
import os
import resource
import select
import signal
import sys

from qurl_megatron.rewards.kinds import KINDS

MEMORY = 4 << 30  # bytes of address space: a huge power is a MemoryError here, not a full machine


def main(kind: str, timeout_s: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable()  # math-verify warns of every bad answer
    results = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not look like a score
    score = KINDS[kind]
    score("$1$", "1")  # imports, before the clock of a check runs
    trainer = os.getppid()
    os.write(results, b"ready\n")
    while True:
        # A forked engine may hold the other end of stdin open after the trainer is gone.
        while not select.select([0], [], [], 1.0)[0]:
            if os.getppid() != trainer:
                return
        line = sys.stdin.buffer.readline()
        if not line:
            return
        text, answer = json.loads(line)
        # The pool kills at timeout_s. Where the pool is gone, this timer's default action does,
        # even inside one long multiplication that no Python handler can interrupt.
        signal.setitimer(signal.ITIMER_PROF, 2 * timeout_s)
        try:
            value = score(text, answer)
        except (Exception, _timeout_exception()):  # model output breaks sympy in every way there is
            value = 0.0
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(results, b"1\n" if value else b"0\n")


def _timeout_exception() -> type[BaseException]:
    """math-verify's own; a BaseException, so that sympy's handlers do not swallow it."""
    from math_verify.errors import TimeoutException

    return TimeoutException


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
