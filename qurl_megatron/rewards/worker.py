"""The process that checks answers: one JSON line in, one out. Started by ``rewards.pool``.

It imports no torch and ignores Ctrl-C, which is for the trainer. A check that takes too long is the
pool's affair, which kills the process.
"""

import json
import logging
import os
import resource
import signal
import sys

from qurl_megatron.rewards.kinds import KINDS

MEMORY = 4 << 30  # bytes of address space: a huge power is a MemoryError here, not a full machine


def main(kind: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable()  # math-verify warns of every bad answer
    results = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not look like a score
    score = KINDS[kind]
    score("$1$", "1")  # imports, before the clock of a check runs
    os.write(results, b"ready\n")
    for line in sys.stdin.buffer:
        text, answer = json.loads(line)
        try:
            value = score(text, answer)
        except (Exception, _timeout_exception()):  # model output breaks sympy in every way there is
            value = 0.0
        os.write(results, b"1\n" if value else b"0\n")


def _timeout_exception() -> type[BaseException]:
    """math-verify's own; a BaseException, so that sympy's handlers do not swallow it."""
    from math_verify.errors import TimeoutException

    return TimeoutException


if __name__ == "__main__":
    main(sys.argv[1])
