"""The engines of one run: started here, adopted by URL, or offered by a batch system.

An adopted engine belongs to one run (``tenancy``), and the name of its weights says to which
(``naming``).

An engine gets traffic only while it has confirmed the current version. One that fails a request,
an update or a health check leaves the traffic at once; the run continues with the others, and the
supervisor heals it: killed and started again where it is ours, waited for where it is not. It is
back with the next publication, which brings it the current weights.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.engines.kinds import ENGINE_KINDS
from qurl_megatron.engines.starting import Launch, given_key
from qurl_megatron.fleet import process
from qurl_megatron.fleet.client import EngineError, deadline
from qurl_megatron.fleet.process import SERVE_COMMAND, EngineProcess
from qurl_megatron.fleet.roster import EngineRecord, Roster
from qurl_megatron.fleet.supervisor import Supervisor
from qurl_megatron.fleet.tenancy import Tenancy
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.text import how_many
from qurl_megatron.tensors.arch import StopIds
from qurl_megatron.wire.lease import Names, Owner

GRACE_S = 10.0  # between SIGTERM and SIGKILL
EXCUSED_S = 15.0  # an adopted engine that fails updates sits out this long, then twice, ...
PROBE_S = 5.0  # for a failed engine to show that it could take part in a publication

Result = TypeVar("Result")


class Fleet(Roster):
    """Context manager; entering waits for the engines, leaving ends those that were started here.

    Thread-safe: requests, publications and the supervisor run side by side.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_dir: Path | str,
        *,
        scheme: str,
        dtype: str = "bfloat16",
        log_dir: Path | str,
        vocabulary: int,
        stops: StopIds | None = None,
        facts: dict[str, Any] | None = None,
        owner: Owner | None = None,
        serve_command: Sequence[str] = SERVE_COMMAND,
        api_key: str | None = None,
        fixed: bool = False,
        trainer_ranks: int = 0,
        stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            model_dir: Hugging Face folder that started engines load first.
            log_dir: gets ``engine-i.log`` per started engine.
            vocabulary: of the model; token ids are below it.
            stops: tokens that end a response; None: not checked.
            facts: ``tensors.arch.facts_of`` the model, which adopted engines are compared with.
            owner: the run that adopted engines are to belong to; None: a new one.
            serve_command: how to start an embedded engine; the options of ``qurl serve`` follow.
            api_key: of adopted servers; engines started here get one that is made for this run.
            fixed: nothing is ever published: engines keep the weights they start with, and SGLang's
                load those in ``model_dir``, whose config.json says how they are quantized.
            trainer_ranks: training ranks on this machine, each on the GPU of its number.
            stop: asked while the first engines are waited for.
            clock: seconds, for all that is due, late or silent.

        Raises:
            ConfigError: QURL_API_KEY is not a key.
        """
        super().__init__(config, scheme=scheme, fixed=fixed, vocabulary=vocabulary, clock=clock)
        owner = owner or Owner.nobody_else()
        self.facts = facts
        self.names, self.stops = Names("" if fixed else owner.token), stops
        self._model_dir, self._dtype = model_dir, dtype
        self._log_dir, self._serve_command = Path(log_dir), tuple(serve_command)
        self._trainer_ranks, self._stop = trainer_ranks, stop
        adopts = config.urls or config.rendezvous
        self.api_key = api_key or (given_key(os.environ) if adopts else None)
        self.tenancy = Tenancy(self, owner)
        self.on_leave = self.tenancy.let_go
        self.supervisor = Supervisor(self, self.tenancy)

    def __enter__(self) -> "Fleet":
        try:
            if not (self.config.urls or self.config.rendezvous):
                self._start()
            for url in self.config.urls:
                self.adopt(url, self.api_key)
            self.tenancy.start()
            self.supervisor.gather(self.config.start_limit_s, self._stop)
            self.supervisor.start()
        except BaseException:
            self.close()  # __exit__ does not run when __enter__ fails
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Terminate the engines that were started here; adopted ones are left alone."""
        self.supervisor.stop()
        self.tenancy.stop()
        process.stop([e.process for e in self._engines if e.process is not None], GRACE_S)
        for engine in self._engines:
            if engine.client is not None:
                engine.client.close()
        self._engines = []

    def recruits(self) -> list[EngineRecord]:
        """Return the engines for a publication: serving, ready, or stale but alive."""
        doubtful = [e for e in self.engines() if e.state == "stale" and not e.pulse.healthy]

        def probe(engine: EngineRecord) -> None:
            engine.api.server_info(PROBE_S)
            engine.pulse.healthy = True

        _in_parallel(probe, [e for e in doubtful if e.client is not None], PROBE_S)
        with self.lock:
            recruits = []
            for engine in self._engines:
                excused = engine.condemned or self.clock() < engine.excused_until
                healed = engine.state == "stale" and engine.pulse.healthy and not excused
                if healed or engine.state in ("serving", "ready"):
                    recruits.append(engine)
            return recruits

    def await_recruits(self, timeout_s: float) -> list[EngineRecord]:
        """Wait for recruits, and return them.

        Raises:
            ConfigError: all refuse our key.
            EngineError: none came in time, or none can come.
        """
        end = time.monotonic() + timeout_s
        while not (recruits := self.recruits()):
            if reason := self.locked_out():
                raise ConfigError(reason)
            if not self.engines() or time.monotonic() > end:
                raise EngineError(f"no engine came back: {self.why_not()}")
            time.sleep(0.2)
        return recruits

    @contextlib.contextmanager
    def publication(self) -> Iterator[list[EngineRecord]]:
        """Yield the recruits, undisturbed: nothing restarts, joins or leaves before the end.

        ``confirm`` those that took the new version. The trainer must have let go of the memory it
        was lent: engines take it back, and those that died meanwhile are started again in it.

        Raises:
            EngineError: there is no engine to publish to, or none took its memory back.
        """
        with self.turn:
            self.resume()
            recruits = self.recruits()
            if not recruits:
                raise EngineError(f"there is no engine to publish to: {self.why_not()}")
            self.publishing = True
            try:
                yield recruits
            finally:
                self.publishing = False
                self.publications += 1

    def each(
        self,
        act: Callable[[EngineRecord], Result],
        purpose: str,
        engines: Iterable[EngineRecord] | None = None,
        *,
        deadline_s: float | None = None,
    ) -> dict[EngineRecord, Result]:
        """Call ``act`` on engines in parallel; one that raises EngineError or is late has failed.

        Args:
            engines: default those that serve.
            deadline_s: default ``rollout.update_timeout_s``; bounds every request that ``act``
                makes, and ``act`` itself.

        Returns:
            The results of those that did not fail.

        Raises:
            EngineError: none is left; names every failure.
        """
        chosen = self.serving() if engines is None else list(engines)
        results, errors = _in_parallel(act, chosen, deadline_s or self.config.update_timeout_s)
        for error in errors.values():
            if not isinstance(error, EngineError):
                raise error
        for engine, error in errors.items():
            assert isinstance(error, EngineError)
            engine.failed_updates += 1
            if engine.process is None and engine.failed_updates > 1:
                # Nobody restarts it, and all wait for it: less and less often.
                wait = EXCUSED_S * 2 ** min(engine.failed_updates, 6)
                engine.excused_until = self.clock() + wait
            self.fail(engine, error.of(purpose))
        if not results:
            reasons = "; ".join(f"{e}: {e.cause}" for e in errors) or self.why_not()
            raise EngineError(f"{purpose} failed on {how_many(len(errors), 'engine')}: {reasons}")
        return results

    def release(self) -> None:
        """Give the engines' device memory to the trainer."""
        self.released = True

        def act(engine: EngineRecord) -> None:
            engine.api.pause("retract")  # SGLang wants to be idle for this
            engine.api.release_memory()
            engine.released = True

        if owners := [engine for engine in self.recruits() if not engine.released]:
            self.each(act, "releasing memory", owners)

    def resume(self) -> None:
        """Take device memory back; a publication must follow."""

        def act(engine: EngineRecord) -> None:
            engine.api.resume_memory()
            engine.released = False

        try:
            # SGLang crashes if it has to take back memory that it has not given.
            lent = any(engine.released for engine in self.engines())
            if lent and (lenders := [engine for engine in self.recruits() if engine.released]):
                self.each(act, "resuming memory", lenders)
        finally:
            self.released = False  # engines that cannot take it back are to be restarted

    def _start(self) -> None:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        for name, launch in self._launches().items():
            started = EngineProcess(name, launch, self._log_dir, self.clock)
            engine = EngineRecord(name, process=started, kind=ENGINE_KINDS[self.config.backend])
            self._engines.append(engine)
            engine.started_at = self.clock()
            started.start()

    def _launches(self) -> dict[str, Launch]:
        return process.launches(
            self.config,
            self._model_dir,
            self._log_dir,
            scheme=self.scheme,
            dtype=self._dtype,
            api_key=self.run_key,
            empty=not self.fixed,
            trainer_ranks=self._trainer_ranks,
            serve_command=self._serve_command,
        )


def _in_parallel(
    act: Callable[[EngineRecord], Result], engines: Sequence[EngineRecord], timeout_s: float
) -> tuple[dict[EngineRecord, Result], dict[EngineRecord, BaseException]]:
    """Return results and errors, each engine in one of them, after ``timeout_s`` at the latest.

    Daemon threads, because one whose engine hangs must not keep the interpreter from ending.
    """
    results: dict[EngineRecord, Result] = {}
    errors: dict[EngineRecord, BaseException] = {}

    def run(engine: EngineRecord) -> None:
        try:
            with deadline(timeout_s):
                outcome = act(engine)
        except BaseException as error:  # for the caller, who raises all but an EngineError
            errors[engine] = error
        else:
            results[engine] = outcome

    threads = [threading.Thread(target=run, args=(e,), daemon=True) for e in engines]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_s + 1.0  # a request that ran into the deadline names itself
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    done, failed = dict(results), dict(errors)  # latecomers write to the others
    for engine in engines:
        if engine not in done and engine not in failed:
            failed[engine] = EngineError(f"{engine} was not done within {timeout_s:.0f} s")
    return {e: done[e] for e in engines if e in done}, failed
