"""The engines of one run: started here, adopted by URL, or offered by a batch system.

An adopted engine belongs to one run (``tenancy``), and what it calls its weights says to which
(``naming``).

An engine gets traffic only while it has confirmed the current version. One that fails a request,
an update or a health check leaves the traffic at once; the run goes on with the others, and the
supervisor heals it: killed and started again where it is ours, waited for where it is not. It is
back with the next publication, which brings it the current weights.
"""

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.engines.sglang.command_line import API_KEY, LOADER, Launch, given_key
from qurl_megatron.errors import ConfigError
from qurl_megatron.fleet import process
from qurl_megatron.fleet.answer import Info
from qurl_megatron.fleet.client import EngineClient, EngineError, deadline
from qurl_megatron.fleet.engine_record import Engine
from qurl_megatron.fleet.membership import Member
from qurl_megatron.fleet.process import SERVE_COMMAND, EngineProcess
from qurl_megatron.fleet.supervisor import Supervisor
from qurl_megatron.fleet.tenancy import Tenancy
from qurl_megatron.observe.clock import now
from qurl_megatron.observe.text import how_many
from qurl_megatron.wire.lease import Owner
from qurl_megatron.wire.naming import Names

__all__ = ["Engine", "Fleet"]

GRACE_S = 10.0  # between SIGTERM and SIGKILL
DEATH_S = 0.5  # a connection breaks a moment before its process is seen to have died
EXCUSED_S = 15.0  # an adopted engine that fails updates sits out this long, then twice, ...
RELIABLE = 3  # versions served in a row, each until the next, for which restarts are forgotten
PROBE_S = 5.0  # for a failed engine to show that it could take part in a publication

Result = TypeVar("Result")


class Fleet:
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
        owner: Owner | None = None,
        serve_command: Sequence[str] = SERVE_COMMAND,
        api_key: str | None = None,
        fixed: bool = False,
        trainer_ranks: int = 0,
        text: bool = False,
    ) -> None:
        """
        Args:
            model_dir: Hugging Face folder that started engines load first.
            log_dir: gets ``engine-i.log`` per started engine.
            vocabulary: of the model; token ids are below it.
            owner: the run that adopted engines are to belong to; None: one that is nobody else.
            serve_command: how to start an embedded engine; the options of ``qurl serve`` follow.
            api_key: of adopted servers; engines started here get one that is made for this run.
            fixed: nothing is ever published: engines keep the weights they start with, and SGLang's
                load those in ``model_dir``, whose config.json says how they are quantized.
            trainer_ranks: training ranks on this machine, each on the GPU of its number.
            text: engines started here read and write text as well, by a tokenizer in ``model_dir``.

        Raises:
            ConfigError: QURL_API_KEY is no key.
        """
        self.config = config
        self.fixed, self.vocabulary = fixed, vocabulary
        owner = owner or Owner.nobody_else()
        self.names = Names("" if fixed else owner.token)
        self.version: int | None = None
        """The version that serving engines have confirmed; None before the first publication."""
        self.released = False
        """True while the engines' device memory is the trainer's."""
        self.publications = 0
        """Grows with each: what was seen of an engine before may have changed with it."""
        self.publishing = False
        self._model_dir, self._scheme, self._dtype = model_dir, scheme, dtype
        self._log_dir, self._serve_command = Path(log_dir), tuple(serve_command)
        self._trainer_ranks, self._text = trainer_ranks, text
        adopts = config.urls or config.rendezvous
        self._api_key = api_key or (given_key(os.environ) if adopts else None)
        self._lock = threading.RLock()  # of all state here and in the engines; held for moments
        self._turn = threading.RLock()  # held through a publication, and for one look around
        self._engines: list[Engine] = []
        self._events: list[dict] = []
        self._counts = dict.fromkeys(("restarts", "retries", "aborted"), 0)
        self.barred: set[str] = set()
        """URLs of engines that have left for good, and are not to be adopted again."""
        self._supervisor = Supervisor(self)
        self.tenancy = Tenancy(self, owner)

    def __enter__(self) -> "Fleet":
        try:
            if not (self.config.urls or self.config.rendezvous):
                self._start()
            for url in self.config.urls:
                self.adopt(Member(url, None), self._api_key)
            self.tenancy.start()
            self._supervisor.gather(self.config.start_limit_s)
            self._supervisor.start()
        except BaseException:
            self.close()  # __exit__ does not run when __enter__ fails
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Terminate the engines that were started here; adopted ones are left alone."""
        self._supervisor.stop()
        self.tenancy.stop()
        process.stop([e.process for e in self._engines if e.process is not None], GRACE_S)
        for engine in self._engines:
            if engine.client is not None:
                engine.client.close()
        self._engines = []

    # Who is there.

    def engines(self) -> list[Engine]:
        """All that have not left, whatever their state."""
        with self._lock:
            return [engine for engine in self._engines if engine.state != "gone"]

    @property
    def adopted(self) -> list[Engine]:
        """All that are not ours to start or end, those that have left as well."""
        with self._lock:
            return [engine for engine in self._engines if engine.process is None]

    def serving(self) -> list[Engine]:
        """Those with the current version: they get the traffic."""
        with self._lock:
            return [engine for engine in self._engines if engine.state == "serving"]

    @property
    def newest(self) -> int | None:
        """The newest version that an engine can have from this run; None before the first."""
        with self._lock:
            return self.version if self.version is None else self.version + self.publishing

    @property
    def clients(self) -> list[EngineClient]:
        return [engine.client for engine in self.engines() if engine.client is not None]

    def refusals(self) -> list[str]:
        """Why engines have left, but for those that do not take our key: others may."""
        with self._lock:
            gone = [engine for engine in self._engines if engine.state == "gone"]
            return [engine.reason for engine in gone if not engine.refuses]

    def locked_out(self) -> str:
        """A sentence where there are engines, and not one of them takes our key."""
        with self._lock:
            if not self._engines or not all(engine.refuses for engine in self._engines):
                return ""
            return "; ".join(engine.reason for engine in self._engines)

    def recruits(self) -> list[Engine]:
        """Those that a publication should include: serving, ready, or stale but alive."""
        doubtful = [e for e in self.engines() if e.state == "stale" and not e.pulse.healthy]

        def probe(engine: Engine) -> None:
            engine.client.server_info(PROBE_S)
            engine.pulse.healthy = True

        _in_parallel(probe, [e for e in doubtful if e.client is not None], PROBE_S)
        with self._lock:
            return [
                engine
                for engine in self._engines
                if engine.state in ("serving", "ready")
                or (
                    engine.state == "stale"
                    and engine.pulse.healthy
                    and not engine.condemned
                    and time.monotonic() >= engine.excused_until
                )
            ]

    def await_recruits(self, timeout_s: float) -> list[Engine]:
        """The recruits, as soon as there are any.

        Raises:
            ConfigError: all refuse our key.
            EngineError: none came in time, or none can come.
        """
        end = time.monotonic() + timeout_s
        while not (found := self.recruits()):
            if reason := self.locked_out():
                raise ConfigError(reason)
            if not self.engines() or time.monotonic() > end:
                raise EngineError(f"no engine came back: {self.why_not()}")
            time.sleep(0.2)
        return found

    def why_not(self) -> str:
        """A sentence on every engine that is not serving."""
        with self._lock:
            return "; ".join(
                f"{engine} is {engine.state}" + (f": {engine.cause}" if engine.cause else "")
                for engine in self._engines
                if engine.state != "serving"
            )

    # Publications.

    @contextlib.contextmanager
    def publication(self) -> Iterator[list[Engine]]:
        """The recruits, undisturbed: nothing is restarted, joins or leaves before the end.

        ``confirm`` those that took the new version.

        Raises:
            EngineError: there is no engine to publish to.
        """
        with self._turn:
            recruits = self.recruits()
            if not recruits:
                raise EngineError(f"there is no engine to publish to: {self.why_not()}")
            self.publishing = True
            try:
                yield recruits
            finally:
                self.publishing = False
                self.publications += 1

    def confirm(self, engines: Collection[Engine], version: int) -> None:
        """These engines, and no others, serve ``version`` from now on."""
        with self._lock:
            self.version = version
            for engine in self.engines():
                if engine in engines:
                    if engine.state != "serving" or engine.version is None:
                        self.note("joined", engine, f"serves version {version}")
                    else:
                        engine.served += 1
                        if engine.served >= RELIABLE:
                            engine.restarts = 0
                    engine.state, engine.version, engine.reason = "serving", version, ""
                    engine.failed_updates = 0
                elif engine.state == "serving":
                    self.fail(engine, f"it was not brought to version {version}")

    def publish(self, folder: Path | str, version: int) -> None:
        """Bring the engines to the weights in ``folder``, under the name of ``version``.

        Raises:
            EngineError: none confirmed the version; names all. Those that fail stay paused and get
                no traffic, the others continue.
        """

        name = self.names.of(version)

        def update(engine: Engine) -> None:
            client = engine.client
            client.pause("retract")
            if engine.kind == "sglang":  # the embedded engine changes name and weights in one step
                client.set_weight_version(self.names.updating(version))
            client.update_weights_from_disk(folder, name)
            served = client.weight_version()
            if served != name:
                raise EngineError(f"{client.url} serves version {served!r} after the update")
            client.resume()

        with self.publication() as engines:
            done = self.each(update, f"publishing version {version}", engines)
            self.confirm(done, version)

    def each(
        self,
        act: Callable[[Engine], Result],
        purpose: str,
        engines: Iterable[Engine] | None = None,
        *,
        deadline_s: float | None = None,
    ) -> dict[Engine, Result]:
        """``act`` on engines in parallel; one that raises EngineError or is late has failed.

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
                engine.excused_until = time.monotonic() + wait
            self.fail(engine, error.of(purpose))
        if not results:
            reasons = "; ".join(f"{e}: {e.cause}" for e in errors) or self.why_not()
            raise EngineError(f"{purpose} failed on {how_many(len(errors), 'engine')}: {reasons}")
        return results

    def release(self, tags: Sequence[str] | None = None) -> None:
        """Give the engines' device memory ("weights", "kv_cache"; None: all) to the trainer."""
        self.released = True

        def act(engine: Engine) -> None:
            engine.client.pause("retract")  # SGLang wants to be idle for this
            engine.client.release_memory(tags)
            engine.released = True

        self.each(act, "releasing memory", self.recruits())

    def resume(self, tags: Sequence[str] | None = None) -> None:
        """Take device memory back, in stages where tags are given; a publication must follow."""
        # SGLang ends over memory that it is told to take back and has not given.
        lenders = [engine for engine in self.recruits() if engine.released]

        def act(engine: Engine) -> None:
            engine.client.resume_memory(tags)
            engine.released = tags is not None

        try:
            if lenders:
                self.each(act, "resuming memory", lenders)
        finally:
            self.released = False  # engines that cannot take it back are to be restarted

    def switch(self, scheme: str) -> None:
        """Start the engines of this run anew, for weights in another number format.

        They come up in the background, as after a death but uncounted, and are back with the next
        publication. What is in flight is lost, so let it come to its end first.

        Raises:
            ConfigError: ``rollout.sglang_python`` does not exist any more.
        """
        assert not (self.config.urls or self.config.rendezvous), "not ours to restart"
        launches = self._launches(scheme)
        with self._turn:
            self._scheme = scheme
            engines = self.engines()
            with self._lock:
                for engine in engines:
                    self.note("switched", engine, f"to scheme {scheme}")
                    engine.state, engine.reason = "starting", f"it switches to scheme {scheme}"
                    engine.failures += 1
                    engine.reset(self.publications)  # an answer on its way counts for nothing
            process.stop([e.process for e in engines if e.process], GRACE_S)
            self.released = False  # nobody is left who lends memory
            for engine in engines:
                engine.process.launch = launches[engine.name]
                self.begin(engine)

    def starting(self) -> bool:
        """True while an engine comes up, or waits for its next attempt."""
        return any(engine.state == "starting" for engine in self.engines())

    # Traffic.

    def take(self, tokens: int, requests: int, *, limit: int | None = None) -> Engine | None:
        """The least loaded serving engine with room for so many responses, now busy with them.

        Args:
            limit: responses in flight per engine; an idle engine takes any number.

        Returns:
            None where all are full, or none serves.
        """
        with self._lock:
            free = [
                engine
                for engine in self.serving()
                if limit is None or not engine.in_flight or engine.in_flight + requests <= limit
            ]
            if not free:
                return None
            chosen = min(free, key=lambda engine: (engine.load, engine.in_flight))
            self.occupy(chosen, tokens, requests)
            return chosen

    def occupy(self, engine: Engine, tokens: int, requests: int) -> None:
        with self._lock:
            engine.in_flight += requests
            engine.tokens_in_flight += tokens

    def vacate(self, engine: Engine, tokens: int, requests: int, *, received: int = 0) -> None:
        with self._lock:
            engine.in_flight -= requests
            engine.tokens_in_flight -= tokens
            engine.tokens += received

    def fail(self, engine: Engine, why: str | EngineError) -> None:
        """Out of the traffic until an update succeeds; its requests are to be given up.

        One that does not take our key is out for good, and one of ours that said what cannot be is
        to be started anew.
        """
        error = why if isinstance(why, EngineError) else EngineError(why)
        if error.refused and engine.process is None:
            self.lock_out(engine, error)
            return
        death = engine.process.exited(DEATH_S) if engine.process is not None else None
        with self._lock:
            if engine.state in ("starting", "gone"):
                return
            if engine.state != "stale":
                self.note("failed", engine, str(error))
            engine.state = "stale"
            engine.condemned |= error.faulty and engine.process is not None
            # The log of a process says more than "connection refused".
            engine.reason = death or str(error)
            engine.failures += 1
            engine.served = 0
            engine.pulse.healthy, engine.pulse.due = False, 0.0

    def lock_out(self, engine: Engine, error: EngineError) -> None:
        """It does not take our key: the run goes on with the others."""
        with self._lock:
            if engine.state != "gone":
                engine.refuses = True
                self.leave(engine, "gave up", f"{error}; give its API key in {API_KEY}")

    # What happened.

    def note(self, event: str, engine: Engine | None, message: str) -> None:
        """Events: started, failed, died, restarted, switched, joined, left, gave up, retried,
        aborted."""
        with self._lock:
            self._events.append(
                {
                    "time": now(),
                    "event": event,
                    "engine": "" if engine is None else engine.name,
                    "message": message,
                }
            )

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def drain(self) -> tuple[list[dict], dict[str, float]]:
        """Events since the last call, in order, and the metrics of the same time."""
        with self._lock:
            events, self._events = self._events, []
            counts = {f"fleet/{name}": float(number) for name, number in self._counts.items()}
            self._counts = dict.fromkeys(self._counts, 0)
            return events, {"fleet/serving": float(len(self.serving())), **counts}

    # For the supervisor.

    def begin(self, engine: Engine) -> None:
        """Start the process of an engine in the place of one that has ended."""
        with self._lock:
            engine.reset(self.publications)
        try:
            engine.process.start()
        except ConfigError as error:
            self.leave(engine, "gave up", str(error))

    def adopt(self, member: Member, api_key: str | None) -> None:
        with self._lock:
            engine = Engine(f"engine-{len(self._engines)}", kind="sglang")
            engine.client = self._client(member.url, api_key)
            engine.started_at = time.monotonic()
            self._engines.append(engine)

    def locate(self, engine: Engine, port: int) -> None:
        """A started engine said where it listens."""
        host = self.config.engine_host
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        with self._lock:
            engine.client = self._client(url, self._run_key)

    def arrived(self, engine: Engine, info: Info) -> None:
        """It answers: ready, or serving where nothing has been published that it could lack."""
        embedded = info.kind == "embedded"
        updatable = embedded or info.loaders is None or LOADER in info.loaders
        if not updatable and not self.fixed:
            self.leave(
                engine,
                "gave up",
                f"{engine.url} runs SGLang without our weight loader, and would die of the first "
                "update; start it with python -m qurl_megatron.engines.sglang.server",
            )
            return
        with self._lock:
            engine.kind, engine.tp = info.kind, info.tp
            # Started without weights.
            empty = engine.process is not None and not embedded and not self.fixed
            engine.state = "ready" if empty or self.version is not None else "serving"
            engine.version, engine.reason = None, ""
            self.note("restarted" if engine.restarts else "started", engine, f"at {engine.url}")

    def leave(self, engine: Engine, event: str, message: str) -> None:
        with self._lock:
            engine.state, engine.reason = "gone", message
            engine.failures += 1
            if event == "gave up" and engine.process is None:
                self.barred.add(engine.url)
            self.note(event, engine, message)
            if engine.process is None:
                self.tenancy.let_go(engine)

    def _client(self, url: str, api_key: str | None) -> EngineClient:
        return EngineClient(url, timeout_s=self.config.timeout_s, api_key=api_key)

    def _start(self) -> None:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._run_key = secrets.token_urlsafe(32)
        for name, launch in self._launches(self._scheme).items():
            started = EngineProcess(name, launch, self._log_dir)
            engine = Engine(name, process=started, kind=self.config.backend)
            self._engines.append(engine)
            engine.started_at = time.monotonic()
            started.start()

    def _launches(self, scheme: str) -> dict[str, Launch]:
        return process.launches(
            self.config,
            self._model_dir,
            self._log_dir,
            scheme=scheme,
            dtype=self._dtype,
            api_key=self._run_key,
            empty=not self.fixed,
            trainer_ranks=self._trainer_ranks,
            serve_command=self._serve_command,
            text=self._text,
        )


def _in_parallel(
    act: Callable[[Engine], Result], engines: Sequence[Engine], timeout_s: float
) -> tuple[dict[Engine, Result], dict[Engine, BaseException]]:
    """Results and errors, each engine in one of them, after ``timeout_s`` at the latest.

    Daemon threads, because one whose engine hangs must not keep the interpreter from ending.
    """
    results: dict[Engine, Result] = {}
    errors: dict[Engine, BaseException] = {}

    def run(engine: Engine) -> None:
        try:
            with deadline(timeout_s):
                outcome = act(engine)
        except BaseException as error:  # handed to the caller, who raises what is no EngineError
            errors[engine] = error
        else:
            results[engine] = outcome

    threads = [threading.Thread(target=run, args=(e,), daemon=True) for e in engines]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_s + 1.0  # a request that ran into the deadline names itself
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    results, errors = dict(results), dict(errors)  # latecomers write to the old ones
    for engine in engines:
        if engine not in results and engine not in errors:
            errors[engine] = EngineError(f"{engine} was not done within {timeout_s:.0f} s")
    return {e: results[e] for e in engines if e in results}, errors
