"""A process that answers numbered JSON lines, and can be killed when it does not.

It runs what nobody has seen before, a user's code or a check of what a model wrote, so that this
may hang, eat memory or crash without the trainer noticing more than a missing answer.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from qurl_megatron.kit.children import children_cores, on_cores, without_launcher
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.undertaker import bury, spare

LINE_BYTES = 1 << 24  # of what a worker says at once


class LineWorker:
    """The pool's end."""

    def __init__(self, module: str, task: dict[str, Any], start_s: float) -> None:
        """
        Args:
            module: what the process runs, with the task as JSON for its argument.
            start_s: seconds it has until it is ready.

        Raises:
            OSError: the machine has no room for another process or open file.
        """
        env = without_launcher(os.environ)
        env.setdefault("OMP_NUM_THREADS", "1")  # a worker is one of many
        with on_cores(children_cores()):
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(task)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=env,
                bufsize=0,  # what was read is what select reports
                process_group=0,  # the terminal's Ctrl-C goes to the trainer's group
            )
        bury(self.process.pid)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._questions, self._answers = self.process.stdin, self.process.stdout
        os.set_blocking(self._questions.fileno(), False)
        self.results = self._answers.fileno()
        self.deadline = time.monotonic() + start_s
        self._asked = 0  # questions; each has its number, and so has the answer to it
        self._said = b""

    def send(self, question: bytes) -> None:
        """One line, by the deadline; what does not get through has the worker miss it."""
        self._asked += 1
        unsent = memoryview(b"%d %s\n" % (self._asked, question))
        room = select.poll()
        room.register(self._questions, select.POLLOUT)
        # A worker that dies meanwhile: its results end, which the pool sees.
        with suppress(BrokenPipeError):
            while unsent and room.poll(1000 * max(0.0, self.deadline - time.monotonic())):
                unsent = unsent[self._questions.write(unsent) or 0 :]

    def receive(self) -> bytes | None:
        """The answer to the last question, or what the process says of itself before the first.

        Returns:
            None where it is not whole yet; empty where the process is gone, or says anything else.
        """
        more = os.read(self.results, 1 << 16)
        self._said += more
        if not more or len(self._said) > LINE_BYTES:
            return b""
        if not self._said.endswith(b"\n"):
            return None
        (number, _, answer), self._said = self._said.partition(b" "), b""
        return answer if number == b"%d" % self._asked else b""

    def dead(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        # Its group: it may have started processes of its own.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # where its code has moved it into another group
        self.process.wait()
        spare(self.process.pid)
        self._questions.close()
        self._answers.close()


def parsed(line: bytes) -> Any:
    """None where it is no JSON, or there is none."""
    with suppress(ValueError, RecursionError):
        return json.loads(line)
    return None


def serve(make: Callable[[], tuple[Any, Callable[[Any], Any]]], memory_gb: float) -> None:
    """The worker's end: answer line by line, until there are no more.

    What its code prints goes to stderr, and what it reads is empty.

    Args:
        make: what the worker says of itself once it is ready, and what answers; its ConfigError is
            said instead, and ends the worker.
        memory_gb: GiB of address space.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which is for the trainer
    # A huge power is a MemoryError here, not a full machine.
    memory = int(memory_gb * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)

    # The code may fork, and its child may come back here: it is never to ask or answer.
    def part_from_the_pool() -> None:
        os.dup2(nothing, requests.fileno())
        os.dup2(nothing, results.fileno())

    os.register_at_fork(after_in_child=part_from_the_pool)
    worker = os.getpid()

    def say(number: bytes, value: Any) -> None:
        if os.getpid() != worker:
            os._exit(1)
        results.write(b"%s %s\n" % (number, json.dumps(value).encode("ascii")))
        results.flush()

    try:
        of_itself, answer = make()
    except ConfigError as error:
        return say(b"0", {"refused": str(error)})
    say(b"0", {"ready": of_itself})
    for line in requests:
        number, _, question = line.partition(b" ")
        say(number, answer(json.loads(question)))
