"""The thread that owns an engine: it runs commands between steps and sleeps when there is no work.

Everything that touches the engine is such a command, so none of its state needs a lock, and
whatever a command does (a weight update, an abort) happens between two decode steps.
"""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch

from qurl_megatron.engines.embedded.engine import Engine, Job, Sequence

log = logging.getLogger(__name__)


class EngineThread:
    """Runs an engine in a thread; ``call`` executes a function there, between two steps."""

    def __init__(self, engine: Engine, threads: int = 0) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        self.paused = False
        self._threads = threads
        self._commands: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Engine], object]) -> Future:
        future: Future = Future()
        self._commands.put((function, future))
        if self.failure is not None:
            self._fail_commands()
        return future

    def submit(self, sequences: list[Sequence]) -> Future:
        """Queue the sequences of one request together; resolves to them when all have ended."""
        job = Job(sequences)

        def refused(added: Future) -> None:
            if error := added.exception():
                job.future.set_exception(error)

        self.call(lambda engine: engine.add(sequences)).add_done_callback(refused)
        return job.future

    def pause(self, *, retract: bool) -> Future:
        """Stop; running sequences are requeued if asked, or else wait where they are."""

        def run(engine: Engine) -> None:
            self.paused = True
            if retract:
                engine.retract()

        return self.call(run)

    def resume(self) -> Future:
        def run(engine: Engine) -> None:
            self.paused = False

        return self.call(run)

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        try:
            while self._obey():
                if self.engine.busy and not self.paused:
                    self.engine.step()
        except BaseException as error:
            # A failed step leaves the batch half written: no answer from it could be trusted.
            log.exception("the engine failed")
            self.failure = error
            for sequence in [*self.engine.running, *self.engine.waiting]:
                if sequence.job is not None and not sequence.job.future.done():
                    sequence.job.future.set_exception(error)
            self._fail_commands()

    def _obey(self) -> bool:
        """Run queued commands; with nothing to generate, sleep until one comes. False: the end."""
        while True:
            idle = self.paused or not self.engine.busy
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            function, future = command
            try:
                future.set_result(function(self.engine))
            except Exception as error:  # the caller's to handle; the engine is as it was
                future.set_exception(error)

    def _fail_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if command is not None:
                command[1].set_exception(RuntimeError(f"the engine failed: {self.failure!r}"))
