"""The engines of one run: started here, adopted by URL, or offered by a batch system.

    starting    its process comes up, or waits for its next attempt
    ready       healthy, but without the current weights: no traffic
    serving     has confirmed the current version
    stale       failed a request, an update or a health check: no traffic until an update succeeds
    gone        left the fleet for good

An engine gets traffic only while it has confirmed the current version. One that fails a request, an
update or a health check gets no more traffic, and the run continues with the others. Between
publications a thread heals it: an engine of ours is killed and started again, any other is waited
for. The next publication brings it the current weights, and then it serves again.

A health check asks for ``/server_info``, which the engine's own loop answers, paused or not.
SGLang's ``/health`` generates a token, and fails while the engine is paused.

The clock alone decides neither that a start failed nor that an engine hangs: one that compiles
kernels, loads weights or captures graphs takes minutes and answers nothing, but writes to its log.
"""

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.engines.kinds import ENGINE_KINDS, LOADER, UNKNOWN, EngineKind
from qurl_megatron.engines.starting import API_KEY, SERVE_COMMAND, Start, given_key
from qurl_megatron.fleet import process
from qurl_megatron.fleet.answer import Info, Routed
from qurl_megatron.fleet.client import EngineClient, EngineError, deadline, in_parallel
from qurl_megatron.fleet.process import EngineProcess
from qurl_megatron.fleet.tenancy import Leases, read_members
from qurl_megatron.kit.clock import now
from qurl_megatron.kit.errors import ConfigError, Interrupted
from qurl_megatron.kit.record import shortened
from qurl_megatron.kit.stop import stop_comes
from qurl_megatron.observe.text import how_many
from qurl_megatron.tensors.arch import StopIds
from qurl_megatron.wire.lease import Names, Owner

GRACE_S = 10.0  # between SIGTERM and SIGKILL
DEATH_S = 0.5  # a connection breaks a moment before its process is seen to have died
LOOK_S = 0.25  # between looks at all engines
RETRY_S = 0.5  # between checks of an engine that gave no good answer
PROBE_S = 5.0  # for a failed engine to show that it can take part in a publication
TOLD_AFTER_S = 1.0  # of waiting, after which the engines that were not started here are named
ABSENT_S = 3.0  # after which an engine counts as gone from the rendezvous
BACK_OFF_S = 1.0  # before the first restart; twice as long before each next
LONGEST_BACK_OFF_S = 60.0
PATIENCE = 2  # updates that an engine may fail in a row before it is restarted
RELIABLE = 3  # whole versions served in a row, after which an engine's restarts are forgotten
IN_ALL = 4  # times its limit: the total after which an engine is late or hung, log or no log

State = Literal["starting", "ready", "serving", "stale", "gone"]
Departure = Literal["gave up", "refused", "left"]
"""Why an engine is gone: it failed or cannot be this run's; it refuses our key; or it is no longer
offered."""

Result = TypeVar("Result")


@dataclass(eq=False)
class Pulse:
    """Health checks of one process between two publications; times are by the fleet's clock.

    Checks that were sent under an earlier pulse are ignored: their process or weights are gone.
    """

    healthy: bool = False
    sent: float | None = None  # when the check under way was sent
    due: float = 0.0  # time of the next check
    silent_since: float | None = None  # when the first check without a good answer was sent
    error: EngineError | None = None  # of the last check


@dataclass(eq=False)
class EngineRecord:
    """State and counters of one engine."""

    name: str
    client: EngineClient | None = None  # None until it has an address
    process: EngineProcess | None = None  # None: adopted, not ours to start or end
    kind: EngineKind = UNKNOWN
    tp: int = 1
    ep: int = 1
    longest_input: int | None = None  # as in ``Info``
    state: State = "starting"
    version: int | None = None  # of the weights it confirmed
    reason: str = ""  # why it is stale or gone
    departure: Departure | None = None
    pointers: tuple[str, ...] = ()  # of each rank: checksum of its parameters' addresses
    released: bool = False  # the trainer has its device memory

    in_flight: int = 0  # responses under way
    tokens_in_flight: int = 0  # their prompt tokens, and the most new ones
    failures: int = 0  # grows whenever its requests are given up
    failed_updates: int = 0  # in a row
    condemned: bool = False  # ours, to be restarted for an impossible answer
    restarts: int = 0  # since it last was reliable
    served: int = 0  # whole versions, in a row
    started_at: float = 0.0
    start_at: float | None = None  # next attempt, while it waits for one
    absent_since: float | None = None  # when it was first missed at the rendezvous
    pulse: Pulse = field(default_factory=Pulse)

    @property
    def url(self) -> str:
        return "" if self.client is None else self.client.url

    @property
    def host(self) -> str:
        """The host in its URL."""
        return urlsplit(self.url).hostname or ""

    @property
    def api(self) -> EngineClient:
        """The client of an engine that has an address.

        Raises:
            EngineError: it has none: its process has not come up.
        """
        if self.client is None:
            raise EngineError(f"{self.name} has no address: its process has not come up")
        return self.client

    @property
    def cause(self) -> str:
        """First line of the reason, without the log behind it."""
        return self.reason.partition("\n")[0].rstrip(":")

    def overdue(self, since: float, limit_s: float, now: float) -> bool:
        """Return whether an engine that starts, or does not answer, has used up its time.

        It has ``limit_s`` after its last sign of life, and ``IN_ALL`` times that in all.

        Args:
            since: when the wait began.
        """
        sign_of_life = since
        if self.process is not None:
            sign_of_life = max(since, self.process.heard())
        return now > sign_of_life + limit_s or now > since + IN_ALL * limit_s

    def __str__(self) -> str:
        return f"{self.name} ({self.url})" if self.client else self.name


class Fleet:
    """Context manager; entering waits for the engines, leaving ends those that were started here.

    Thread-safe: requests, publications and the thread that looks after the engines run side by
    side. Only ``_admit``, ``fail`` and ``leave`` change an engine's state.
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
        routed: Routed | None = None,
        facts: dict[str, Any] | None = None,
        owner: Owner | None = None,
        serve_command: Sequence[str] = SERVE_COMMAND,
        fixed: bool = False,
        trainer_ranks: int = 0,
        stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            model_dir: Hugging Face folder that started engines load first.
            scheme: number format of the weights that are published.
            log_dir: gets ``engine-i.log`` per started engine.
            vocabulary: of the model; token ids are below it.
            stops: tokens that end a response; None: not checked.
            routed: the model's experts, if answers are to name each token's; None otherwise.
            facts: ``tensors.arch.facts_of`` the model, with which adopted engines are compared.
            owner: the run that adopted engines are to belong to; None: a new run.
            serve_command: starts an embedded engine; the options of ``qurl serve`` follow.
            fixed: nothing is ever published. Engines keep the weights they start with; SGLang loads
                those in ``model_dir``, whose config.json says how they are quantized.
            trainer_ranks: training ranks on this machine; rank i has GPU i.
            stop: asked while the first engines are waited for.
            clock: in seconds, for all limits.

        Raises:
            ConfigError: QURL_API_KEY is not a key, or the rendezvous is a file.
        """
        owner = owner or Owner.nobody_else()
        self.config, self.scheme, self.fixed, self.clock = config, scheme, fixed, clock
        self.vocabulary, self.stops, self._facts = vocabulary, stops, facts
        self.routed = routed
        self.names = Names("" if fixed else owner.token)
        self.version: int | None = None
        """The version that serving engines have confirmed; None before the first publication."""
        self.released = False
        """True while the engines' device memory is the trainer's."""
        self.publishing = False
        self.lock = threading.RLock()
        """Guards all state here and in the engines; held for moments."""
        self.turn = threading.RLock()
        """Held during a publication, and while the thread looks after the engines."""
        self.run_key = secrets.token_urlsafe(32)
        """API key of the engines that are started here."""
        self._starting = Start(
            config=config,
            model_dir=Path(model_dir),
            folder=Path(log_dir),
            scheme=scheme,
            dtype=dtype,
            api_key=self.run_key,
            empty=not fixed,
            routed=routed is not None,
            trainer_ranks=trainer_ranks,
            serve_command=tuple(serve_command),
        )
        self._stop = stop
        self._rendezvous = Path(config.rendezvous)
        if self._rendezvous.is_file():
            raise ConfigError(
                f"rollout.rendezvous={config.rendezvous} is a file; name a folder with one JSON "
                "file per engine"
            )
        self._given_key = given_key(os.environ) if config.urls or config.rendezvous else None
        self._leases = Leases(owner, take_over=config.take_over, lost=self._lost, clock=clock)
        self._engines: list[EngineRecord] = []
        self._barred: set[str] = set()  # URLs of engines that are not to be adopted again
        self._complaints: list[str] = []  # about the rendezvous; each is recorded once
        self._events: list[dict] = []
        self._counts = dict.fromkeys(("restarts", "retries"), 0)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def __enter__(self) -> "Fleet":
        try:
            if not (self.config.urls or self.config.rendezvous):
                self._start()
            for url in self.config.urls:
                self._adopt(url, self._given_key)
            self._gather()
            self._thread.start()
        except BaseException:
            self.close()  # __exit__ does not run when __enter__ fails
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Terminate the engines that were started here; adopted ones are left alone."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._leases.end()
        process.stop([e.process for e in self._engines if e.process is not None], GRACE_S)
        for engine in self._engines:
            if engine.client is not None:
                engine.client.close()
        self._engines = []

    # Membership.

    def engines(self) -> list[EngineRecord]:
        """Return all that have not left, whatever their state."""
        with self.lock:
            return [engine for engine in self._engines if engine.state != "gone"]

    def serving(self) -> list[EngineRecord]:
        """Return the engines with the current version: they get the traffic."""
        with self.lock:
            return [engine for engine in self._engines if engine.state == "serving"]

    @property
    def newest(self) -> int | None:
        """The newest version of this run that an engine can have; None before the first."""
        with self.lock:
            if self.version is None:
                return None
            return self.version + self.publishing

    def why_not(self) -> str:
        """Return a sentence on every engine that is not serving."""
        with self.lock:
            sentences = []
            for engine in self._engines:
                if engine.state != "serving":
                    cause = f": {engine.cause}" if engine.cause else ""
                    sentences.append(f"{engine} is {engine.state}{cause}")
            return "; ".join(sentences)

    def _refuse_locked_out(self) -> None:
        """Raise ConfigError where there are engines, and none of them takes our key."""
        with self.lock:
            if self._engines and all(engine.departure == "refused" for engine in self._engines):
                raise ConfigError("; ".join(engine.reason for engine in self._engines))

    # States.

    def _admit(self, engine: EngineRecord, version: int | None) -> None:
        """Have an engine serve, or wait as "ready" if it lacks the current weights.

        Args:
            version: the version that it has confirmed; None: it has just come up.
        """
        empty = engine.process is not None and engine.kind.starts_empty and not self.fixed
        lacking = version is None and (empty or self.version is not None)
        engine.state = "ready" if lacking else "serving"
        engine.version, engine.reason = version, ""

    def fail(
        self, engine: EngineRecord, cause: str | EngineError, *, start_at: float | None = None
    ) -> None:
        """Send an engine no requests until an update succeeds, and give up those under way.

        An engine that refuses our key leaves for good. One of ours that gave an impossible answer
        is restarted.

        Args:
            start_at: if its process has ended, the time of the next attempt.
        """
        error = cause if isinstance(cause, EngineError) else EngineError(cause)
        if error.refused and engine.process is None:
            self.leave(engine, f"{error}; give its API key in {API_KEY}", "refused")
            return
        ended = start_at is not None
        # The log of a process says more than "connection refused".
        death = engine.process.exited(DEATH_S) if engine.process and not ended else None
        with self.lock:
            if engine.state == "gone" or (engine.state == "starting" and not ended):
                return
            if engine.state != "stale" and not ended:
                self.note("failed", engine, str(error))
            engine.state = "starting" if ended else "stale"
            engine.reason, engine.start_at = death or str(error), start_at
            engine.condemned |= error.faulty and engine.process is not None
            engine.failures += 1
            engine.served = 0
            engine.pulse.healthy, engine.pulse.due = False, 0.0

    def leave(self, engine: EngineRecord, message: str, departure: Departure = "gave up") -> None:
        """Remove an engine for good; the run continues with the others."""
        with self.lock:
            if engine.state == "gone":
                return
            engine.state, engine.reason, engine.departure = "gone", message, departure
            engine.failures += 1
            self.note("left" if departure == "left" else "gave up", engine, message)
            if engine.process is None and engine.client is not None:
                if departure != "left":
                    self._barred.add(engine.url)
                self._leases.let_go(engine.client)

    def _lost(self, client: EngineClient, message: str) -> None:
        for engine in self.engines():
            if engine.client is client:
                self.leave(engine, message)

    # Traffic.

    def take(
        self,
        tokens: int,
        requests: int,
        *,
        limit: int | None = None,
        wanted: EngineRecord | None = None,
    ) -> EngineRecord | None:
        """Book the wanted engine if it serves, else the least loaded one with room.

        Args:
            tokens: prompt tokens, and the most new ones.
            requests: number of responses.
            limit: most responses in flight per engine; an idle engine takes any number.

        Returns:
            The engine; None if all are full, or none serves.
        """

        def load(engine: EngineRecord) -> tuple[float, int]:
            return engine.tokens_in_flight / engine.tp, engine.in_flight

        with self.lock:
            free = []
            for engine in self.serving():
                if limit is None or not engine.in_flight or engine.in_flight + requests <= limit:
                    free.append(engine)
            chosen = min(free, key=load, default=None)
            if wanted is not None and wanted.state == "serving":
                chosen = wanted
            if chosen is not None:
                chosen.in_flight += requests
                chosen.tokens_in_flight += tokens
            return chosen

    def vacate(self, engine: EngineRecord, tokens: int, requests: int) -> None:
        with self.lock:
            engine.in_flight -= requests
            engine.tokens_in_flight -= tokens

    # Events.

    def note(self, event: str, engine: EngineRecord | None, message: str) -> None:
        """Record an event: started, failed, died, restarted, joined, left, gave up, retried."""
        name = "" if engine is None else engine.name
        with self.lock:
            entry = {"time": now(), "event": event, "engine": name, "message": message}
            self._events.append(entry)

    def count(self, name: str, number: int = 1) -> None:
        with self.lock:
            self._counts[name] += number

    def drain(self) -> tuple[list[dict], dict[str, float]]:
        """Return the events since the last call, in order, and the metrics for that time."""
        with self.lock:
            events, self._events = self._events, []
            counts = {f"fleet/{name}": float(number) for name, number in self._counts.items()}
            self._counts = dict.fromkeys(self._counts, 0)
            return events, {"fleet/serving": float(len(self.serving())), **counts}

    # Weights.

    def recruits(self) -> list[EngineRecord]:
        """Return the engines for a publication: serving, ready, or stale but alive."""

        def probe(engine: EngineRecord) -> None:
            engine.api.server_info(PROBE_S)
            engine.pulse.healthy = True

        doubtful = [e for e in self.engines() if e.state == "stale" and not e.pulse.healthy]
        in_parallel(probe, doubtful, PROBE_S)
        with self.lock:
            recruits = []
            for engine in self._engines:
                healed = engine.state == "stale" and engine.pulse.healthy
                if (healed and not engine.condemned) or engine.state in ("serving", "ready"):
                    recruits.append(engine)
            return recruits

    def await_recruits(self, timeout_s: float) -> list[EngineRecord]:
        """Wait for recruits, and return them.

        Raises:
            ConfigError: all refuse our key.
            EngineError: none came in time, or none can come.
        """
        end = self.clock() + timeout_s
        while not (recruits := self.recruits()):
            self._refuse_locked_out()
            if not self.engines() or self.clock() > end:
                raise EngineError(f"no engine came back: {self.why_not()}")
            time.sleep(LOOK_S)
        return recruits

    @contextlib.contextmanager
    def publication(self) -> Iterator[list[EngineRecord]]:
        """Yield the recruits; inside, no engine is restarted, healed or adopted.

        ``confirm`` those that took the new version. The trainer must have freed the memory that it
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
                with self.lock:
                    self.publishing = False
                    for engine in self._engines:  # a silence during the publication is forgiven
                        engine.pulse = Pulse(engine.pulse.healthy)

    def confirm(self, engines: Collection[EngineRecord], version: int) -> None:
        """Have these engines and no others serve ``version``."""
        with self.lock:
            self.version = version
            for engine in self.engines():
                if engine in engines:
                    if engine.state != "serving" or engine.version is None:
                        self.note("joined", engine, f"serves version {version}")
                    else:
                        engine.served += 1
                        if engine.served >= RELIABLE:
                            engine.restarts = 0
                    engine.failed_updates = 0
                    self._admit(engine, version)
                elif engine.state == "serving":
                    self.fail(engine, f"it was not brought to version {version}")

    def each(
        self, act: Callable[[EngineRecord], Result], purpose: str, engines: Iterable[EngineRecord]
    ) -> dict[EngineRecord, Result]:
        """Call ``act`` on engines in parallel; an engine whose call raises or is late has failed.

        ``rollout.update_timeout_s`` bounds each call, all its requests included.

        Returns:
            The results by engine, without those that failed.

        Raises:
            EngineError: none is left; names every failure.
        """
        results, errors = in_parallel(act, list(engines), self.config.update_timeout_s)
        for engine, error in errors.items():
            engine.failed_updates += 1
            message = f"{purpose} failed: {error}"
            self.fail(engine, EngineError(message, status=error.status, faulty=error.faulty))
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
            # SGLang crashes if it is to take back memory that it has not given.
            lent = any(engine.released for engine in self.engines())
            if lent and (lenders := [engine for engine in self.recruits() if engine.released]):
                self.each(act, "resuming memory", lenders)
        finally:
            self.released = False  # engines that cannot take it back are to be restarted

    # Start.

    def _start(self) -> None:
        folder = self._starting.folder
        folder.mkdir(parents=True, exist_ok=True)
        for name, launch in self._starting.launches().items():
            started = EngineProcess(name, launch, folder, self.clock)
            engine = EngineRecord(name, process=started, kind=ENGINE_KINDS[self.config.backend])
            self._engines.append(engine)
            engine.started_at = self.clock()
            started.start()

    def _adopt(self, url: str, api_key: str | None) -> None:
        with self.lock:
            engine = EngineRecord(f"engine-{len(self._engines)}", self._client(url, api_key))
            engine.started_at = self.clock()
            self._engines.append(engine)

    def _client(self, url: str, api_key: str | None) -> EngineClient:
        return EngineClient(url, timeout_s=self.config.timeout_s, api_key=api_key)

    def _gather(self) -> None:
        """Wait for the engines that a run begins with.

        An engine that refuses our key is left out if another takes it.

        Raises:
            Interrupted: ``stop()`` became true.
            ConfigError: an engine cannot be this run's, or all refuse our key.
            EngineError: an engine died or did not come up in time.
        """
        limit_s, began, reported = self.config.start_limit_s, self.clock(), False
        needed = self.config.engines if self.config.rendezvous else 1
        while True:
            if self._stop():
                raise Interrupted("stopped while engines were waited for")
            self._look()
            with self.lock:  # a consistent view: an engine may leave at any moment
                engines, time_s = self.engines(), self.clock()
                waiting = [engine for engine in engines if engine.state == "starting"]
                reasons = [e.reason for e in self._engines if e.departure == "gave up"]
            for engine in engines:
                if engine.process and (death := engine.process.exited()):
                    if stop_comes(self._stop):
                        raise Interrupted("stopped while engines were waited for")
                    raise EngineError(f"{engine.name} {death}")
            if reasons:
                raise ConfigError("; ".join(reasons))
            self._refuse_locked_out()
            if not waiting and len(engines) >= needed:
                return
            overdue = [e for e in waiting if e.overdue(e.started_at, limit_s, time_s)]
            if overdue:
                raise EngineError("; ".join(_lateness(e, limit_s, time_s) for e in overdue))
            if not waiting and time_s > began + limit_s:
                complaints = "; ".join(self._complaints)
                raise EngineError(
                    f"rollout.rendezvous {self._rendezvous} offers {len(engines)} of "
                    f"{needed} engines after {limit_s:.0f} s {complaints}".rstrip()
                )
            if time_s > began + TOLD_AFTER_S and not reported:
                reported = True
                self._tell(waiting, needed - len(engines))
            self._stopping.wait(RETRY_S / 10)

    def _tell(self, waiting: list[EngineRecord], missing: int) -> None:
        """Print the engines that the run waits for and has not started itself."""
        limit = f"for {self.config.start_limit_s:g} s at most (rollout.start_timeout_s)"
        for engine in waiting:
            if engine.process is None:
                state = engine.pulse.error or "no answer yet"
                print(f"waiting for {engine.url} {limit}: {state}", flush=True)
        if missing > 0:
            print(f"waiting for {missing} of {self.config.engines} engines {limit}", flush=True)

    # Health.

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_S):
            self.look_after()

    def look_after(self) -> None:
        """Look at every engine once and heal those that need it, but not during a publication."""
        self._leases.renew()
        # Never wait for a publication here: close() waits for this thread.
        if self.turn.acquire(blocking=False):
            try:
                self._look()
                self._heal()
            finally:
                self.turn.release()

    def _look(self) -> None:
        """Update the membership, and send the health checks that are due."""
        self._leases.renew()
        if self.config.rendezvous:
            self._meet(self._rendezvous)
        for engine in self.engines():
            if engine.process is not None:
                engine.process.heard()
                starts = engine.client is None and engine.start_at is None
                if starts and (port := engine.process.port()):
                    url = process.url_at(self.config.engine_host, port)
                    with self.lock:
                        engine.client = self._client(url, self.run_key)
            if engine.client is not None:
                self._ask(engine, engine.client)

    def _ask(self, engine: EngineRecord, client: EngineClient) -> None:
        """Send a health check if one is due; without an answer in time the engine is silent."""
        with self.lock:
            pulse, time_s = engine.pulse, self.clock()
            if pulse.sent is None:
                if time_s >= pulse.due:
                    pulse.sent = time_s
                    check = (engine, client, pulse)
                    threading.Thread(target=self._check, args=check, daemon=True).start()
            elif time_s > pulse.sent + self._health_limit_s(engine) + LOOK_S:
                # It hangs where no deadline applies, such as behind a lease that is given back.
                pulse.silent_since = pulse.silent_since or pulse.sent
                pulse.error = EngineError(f"{engine.url}: its health check has not come back")

    def _health_limit_s(self, engine: EngineRecord) -> float:
        return self.config.health_timeout_s or engine.kind.health_timeout_s

    def _check(self, engine: EngineRecord, client: EngineClient, pulse: Pulse) -> None:
        error, limit_s = None, self._health_limit_s(engine)
        try:
            with deadline(limit_s):
                info = client.info(limit_s)
                if engine.state == "starting":
                    self._examine(engine, client, info)
        except EngineError as failure:
            error = failure
            if error.refused and engine.process is None:
                self.fail(engine, error)
        except ConfigError as refusal:
            self.leave(engine, str(refusal))
        with self.lock:
            if engine.pulse is not pulse:
                return
            sent, pulse.sent = pulse.sent, None
            pulse.healthy, pulse.error = error is None, error
            if error is not None:
                pulse.silent_since = pulse.silent_since or sent
                pulse.due = self.clock() + RETRY_S
                return
            pulse.silent_since, pulse.due = None, self.clock() + self.config.health_every_s
            # A failed engine has to wait for the next version, unless nothing is published.
            if engine.state == "starting" or (engine.state == "stale" and self.fixed):
                engine.kind, engine.tp, engine.ep = info.kind, info.tp, info.ep
                engine.longest_input = info.longest_input
                self._admit(engine, None)
                self.note("restarted" if engine.restarts else "started", engine, f"at {client.url}")

    def _examine(self, engine: EngineRecord, client: EngineClient, info: Info) -> None:
        """Check an engine that has come up, and lease it if it is adopted.

        Raises:
            ConfigError: it cannot be this run's.
            EngineError: ask again.
        """
        if engine.process is not None:
            engine.process.look()
        if self.fixed:
            return
        self._refuse_unfit(client.url, info)
        if engine.process is not None:
            return
        computes = self._leases.claim(client, lambda: engine.state != "gone")
        differences = []
        for name, expected in (self._facts or {}).items():
            if computes and name in computes and computes[name] != expected:
                actual = shortened(computes[name])
                differences.append(f"{name} is {actual} there and {shortened(expected)} here")
        if differences:
            raise ConfigError(
                f"{client.url} computes another model than this run trains: "
                f"{', '.join(differences)}; start it on a folder with this run's config.json and "
                "generation_config.json"
            )

    def _refuse_unfit(self, url: str, info: Info) -> None:
        """Raise ConfigError where this run cannot publish to an engine, or train on its tokens."""
        # SGLang may not report its loaders; an embedded engine that does not is too old.
        silent = info.loaders is None and info.kind.says is None
        if not (silent or LOADER in (info.loaders or ())):
            raise ConfigError(
                f"{url} does not have the weight loader of this version, and would fail in the "
                "first update; install this version of the package there, and start the engine "
                f"with {info.kind.serve}"
            )
        if info.scheme not in (None, self.scheme):
            raise ConfigError(
                f"{url} takes weights of scheme {info.scheme}, and this run publishes those "
                f"of quant.scheme={self.scheme}; start it with --scheme {self.scheme}, or set "
                "quant.scheme to its own"
            )
        if info.resamples:
            raise ConfigError(
                f"{url} samples from another distribution than this run trains on, by its "
                f"own {info.resamples}; start it without"
            )
        if self.routed and info.records_experts is False:
            raise ConfigError(
                f"{url} does not record its experts, which model.routing_replay=rollout replays; "
                "start it with --enable-return-routed-experts"
            )
        if info.moves_experts and (self._facts or {}).get("experts"):
            raise ConfigError(
                f"{url} keeps experts where no update finds them, by its own {info.moves_experts}; "
                "start it without, and with --moe-runner-backend triton"
            )

    def _heal(self) -> None:
        for engine in self.engines():
            process, time_s = engine.process, self.clock()
            silent = engine.pulse.silent_since  # read once: an answer may come at any time
            if engine.start_at is not None:
                # A colocated engine must not come up in memory that is the trainer's now.
                if time_s >= engine.start_at and not self.released:
                    self._restart(engine)
            elif process and (death := process.exited()):
                self._died(engine, death)
            elif engine.state == "starting":
                limit_s = self.config.start_limit_s
                if process and engine.overdue(engine.started_at, limit_s, time_s):
                    self.note("failed", engine, _lateness(engine, limit_s, time_s))
                    process.kill()
            elif silent is None:
                if process and (engine.condemned or engine.failed_updates >= PATIENCE):
                    process.kill()
            elif engine.overdue(silent, self._health_limit_s(engine), time_s):
                silence = f"no health check was answered for {time_s - silent:.0f} s"
                self.fail(engine, f"{silence} ({engine.pulse.error})")
                if process:
                    process.kill()

    def _died(self, engine: EngineRecord, death: str) -> None:
        with self.lock:
            self.note("died", engine, death)
            if engine.restarts >= self.config.max_restarts:
                self.leave(engine, f"after {how_many(engine.restarts, 'restart')}; it {death}")
                return
            reason = death
            if engine.condemned:  # it was killed for that
                reason = engine.reason
            pause_s = min(BACK_OFF_S * 2**engine.restarts, LONGEST_BACK_OFF_S)
            self.fail(engine, reason, start_at=self.clock() + pause_s)

    def _restart(self, engine: EngineRecord) -> None:
        """Start a new process of an engine whose last one has ended."""
        assert engine.process is not None, "an adopted one is not ours to start"
        engine.process.kill()  # children that outlived it would keep its memory
        with self.lock:
            if engine.client is not None:
                engine.client.close()
            engine.client, engine.start_at, engine.released = None, None, False
            engine.failed_updates, engine.condemned, engine.pointers = 0, False, ()
            engine.pulse, engine.started_at = Pulse(), self.clock()
            engine.restarts += 1
            self.count("restarts")
        try:
            engine.process.start()
        except ConfigError as error:
            self.leave(engine, str(error))

    def _meet(self, rendezvous: Path) -> None:
        """Adopt engines that are new at the rendezvous, and drop those gone from it."""
        wrong: list[Exception] = []  # entries, maybe half written; read again at the next look
        members = read_members(rendezvous, wrong.append)
        by_url = {engine.url: engine for engine in self.engines()}
        self._barred &= members.keys()
        for url, member in members.items():
            if url not in by_url and url not in self._barred:
                try:
                    self._adopt(url, member.api_key(rendezvous) or self._given_key)
                except (ConfigError, EngineError) as error:
                    wrong.append(error)
        for url, engine in by_url.items():
            if url in members:
                engine.absent_since = None
            elif engine.absent_since is None:
                engine.absent_since = self.clock()
            elif self.clock() >= engine.absent_since + ABSENT_S:
                # Not earlier: a file that is being rewritten is empty for a moment.
                self.leave(engine, "it is gone from the rendezvous", "left")
        before, self._complaints = self._complaints, [str(error) for error in wrong]
        for complaint in self._complaints:
            if complaint not in before:
                self.note("failed", None, complaint)


def _lateness(engine: EngineRecord, limit_s: float, now: float) -> str:
    """Return a sentence about an engine that did not come up in time."""
    if engine.process is None:
        return f"{engine} did not answer within {limit_s:g} s: {engine.pulse.error}"
    awaited = "its health check" if engine.client else "it to report its port"
    quiet = now - engine.process.heard()
    cause = f"its log has not grown for {quiet:.0f} s" if quiet > limit_s else "it is still busy"
    return (
        f"{engine} did not start: waited {now - engine.started_at:.0f} s for {awaited}, and "
        f"{cause}; the limit is {limit_s:g} s without a new line in its log, and "
        f"{IN_ALL * limit_s:g} s in total (rollout.start_timeout_s); see {engine.process.log}, "
        f"whose last line is: {engine.process.last_line() or '(nothing)'}"
    )
