"""The engines of a run and their states, all changed here, under one lock.

    starting    its process comes up, or waits for its next attempt
    ready       healthy, but without the current weights: no traffic
    serving     confirmed on the current version
    stale       failed a request, an update or a health check: no traffic until an update succeeds
    gone        left the fleet for good

Events are kept, in order, for whoever asks.
"""

import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.engines.kinds import UNKNOWN, EngineKind
from qurl_megatron.engines.starting import API_KEY
from qurl_megatron.fleet.answer import Info
from qurl_megatron.fleet.client import EngineClient, EngineError
from qurl_megatron.fleet.process import EngineProcess
from qurl_megatron.kit.clock import now
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.record import shortened
from qurl_megatron.wire.message import LOADER

DEATH_S = 0.5  # a connection breaks a moment before its process is seen to have died
RELIABLE = 3  # versions served in a row, each until the next, after which restarts are forgotten

State = Literal["starting", "ready", "serving", "stale", "gone"]


@dataclass
class Pulse:
    """Health checks of one engine; times are by the fleet's clock."""

    healthy: bool = False
    sent: float | None = None  # when the check went out that is on its way
    due: float = 0.0  # the next one
    silent_since: float | None = None  # when the first check went out that got no good answer
    error: EngineError | None = None  # of the last check
    epoch: int = 0  # publications before it; a check sent before the last one counts for nothing


@dataclass(eq=False)
class EngineRecord:
    """State and counters of one engine; equal only to itself."""

    name: str
    client: EngineClient | None = None  # None until it has an address
    process: EngineProcess | None = None  # None: adopted, not ours to start or end
    kind: EngineKind = UNKNOWN
    tp: int = 1
    longest_input: int | None = None  # tokens that it can continue; None: it does not say
    state: State = "starting"
    version: int | None = None  # of the weights it confirmed
    reason: str = ""  # why it is stale or gone
    pointers: tuple[str, ...] = ()  # of each rank, where its parameters lie

    leased_s: float | None = None  # time left of another run's lease when it was last asked for
    ours: bool = False  # its lease is this run's

    released: bool = False  # its device memory is the trainer's

    in_flight: int = 0  # responses asked of it
    tokens_in_flight: int = 0  # prompt tokens, and at most that many new ones
    tokens: int = 0  # received from it
    failures: int = 0  # grows whenever its requests are given up
    failed_updates: int = 0  # in a row
    condemned: bool = False  # ours, and it gave an impossible answer: to be restarted
    refuses: bool = False  # left because it does not take our key
    withdrawn: bool = False  # left because nobody offers it any more
    excused_until: float = 0.0  # not asked to take part before that time
    restarts: int = 0  # since it last was reliable
    served: int = 0  # versions from the first token to the last, in a row
    started_at: float = 0.0
    start_at: float | None = None  # next attempt, while it waits for one
    pulse: Pulse = field(default_factory=Pulse)

    @property
    def url(self) -> str:
        return "" if self.client is None else self.client.url

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
    def load(self) -> float:
        """Tokens in flight per device."""
        return self.tokens_in_flight / self.tp

    @property
    def cause(self) -> str:
        """The reason's first line, without the end of a log."""
        return self.reason.partition("\n")[0].rstrip(":")

    def reset(self, epoch: int, now: float) -> None:
        """Forget the process that was: another one is about to start in its place.

        Args:
            epoch: the fleet's publications so far.
        """
        if self.client is not None:
            self.client.close()
        self.client, self.start_at, self.released = None, None, False
        self.failed_updates, self.condemned, self.served, self.pointers = 0, False, 0, ()
        self.pulse = Pulse(epoch=epoch)
        self.started_at = now

    def __str__(self) -> str:
        return f"{self.name} ({self.url})" if self.client else self.name


class Roster:
    """The engines of one run; thread-safe.

    Requests, publications and the supervisor run side by side.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        scheme: str,
        fixed: bool,
        vocabulary: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            scheme: of the weights.
            fixed: nothing is ever published: engines keep the weights they start with.
            vocabulary: of the model; token ids are below it.
            clock: seconds, for all that is due, late or silent.
        """
        self.clock = clock
        self.config, self.fixed, self.vocabulary = config, fixed, vocabulary
        self.version: int | None = None
        """The version that serving engines have confirmed; None before the first publication."""
        self.scheme = scheme
        """Number format of the weights that are published."""
        self.released = False
        """True while the engines' device memory is the trainer's."""
        self.publications = 0
        """Number of publications; each may outdate earlier observations of an engine."""
        self.publishing = False
        self.lock = threading.RLock()
        """Of all state here and in the engines; held for moments."""
        self.turn = threading.RLock()
        """Held through a publication, and for one look around."""
        self.barred: set[str] = set()
        """URLs of engines that have left for good, and are not to be adopted again."""
        self.on_leave: Callable[[EngineRecord], None] = lambda engine: None
        """Called with every adopted engine that leaves."""
        self.facts: dict[str, Any] | None = None
        """``tensors.arch.facts_of`` the model whose weights are published; None: nobody knows."""
        self.run_key = secrets.token_urlsafe(32)
        """API key of the engines that are started here."""
        self.api_key: str | None = None
        """API key of adopted engines that bring none of their own."""
        self._engines: list[EngineRecord] = []
        self._events: list[dict] = []
        self._counts = dict.fromkeys(("restarts", "retries", "aborted"), 0)

    def engines(self) -> list[EngineRecord]:
        """Return all that have not left, whatever their state."""
        with self.lock:
            return [engine for engine in self._engines if engine.state != "gone"]

    @property
    def adopted(self) -> list[EngineRecord]:
        """Adopted engines, those that have left as well."""
        with self.lock:
            return [engine for engine in self._engines if engine.process is None]

    def serving(self) -> list[EngineRecord]:
        """Return the engines with the current version: they get the traffic."""
        with self.lock:
            return [engine for engine in self._engines if engine.state == "serving"]

    @property
    def newest(self) -> int | None:
        """The newest version that an engine can have from this run; None before the first."""
        with self.lock:
            return self.version if self.version is None else self.version + self.publishing

    @property
    def clients(self) -> list[EngineClient]:
        return [engine.client for engine in self.engines() if engine.client is not None]

    def refusals(self) -> list[str]:
        """Return why engines have left, unless others may come instead: those that do not take our
        key, or that the batch system took away."""
        with self.lock:
            gone = [engine for engine in self._engines if engine.state == "gone"]
            return [e.reason for e in gone if not (e.refuses or e.withdrawn)]

    def locked_out(self) -> str:
        """Return a sentence where there are engines, and none of them takes our key; else ""."""
        with self.lock:
            if not self._engines or not all(engine.refuses for engine in self._engines):
                return ""
            return "; ".join(engine.reason for engine in self._engines)

    def why_not(self) -> str:
        """Return a sentence on every engine that is not serving."""
        with self.lock:
            sentences = []
            for engine in self._engines:
                if engine.state != "serving":
                    cause = f": {engine.cause}" if engine.cause else ""
                    sentences.append(f"{engine} is {engine.state}{cause}")
            return "; ".join(sentences)

    def starting(self) -> bool:
        """Return whether an engine comes up, or waits for its next attempt."""
        return any(engine.state == "starting" for engine in self.engines())

    def confirm(self, engines: Collection[EngineRecord], version: int) -> None:
        """Have these engines, and no others, serve ``version`` from now on."""
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
                    engine.state, engine.version, engine.reason = "serving", version, ""
                    engine.failed_updates = 0
                elif engine.state == "serving":
                    self.fail(engine, f"it was not brought to version {version}")

    def take(self, tokens: int, requests: int, *, limit: int | None = None) -> EngineRecord | None:
        """Occupy the least loaded serving engine with room for so many responses.

        Args:
            limit: responses in flight per engine; an idle engine takes any number.

        Returns:
            None where all are full, or none serves.
        """
        with self.lock:
            free = []
            for engine in self.serving():
                if limit is None or not engine.in_flight or engine.in_flight + requests <= limit:
                    free.append(engine)
            if not free:
                return None
            chosen = min(free, key=lambda engine: (engine.load, engine.in_flight))
            self.occupy(chosen, tokens, requests)
            return chosen

    def occupy(self, engine: EngineRecord, tokens: int, requests: int) -> None:
        with self.lock:
            engine.in_flight += requests
            engine.tokens_in_flight += tokens

    def vacate(
        self, engine: EngineRecord, tokens: int, requests: int, *, received: int = 0
    ) -> None:
        with self.lock:
            engine.in_flight -= requests
            engine.tokens_in_flight -= tokens
            engine.tokens += received

    def fail(self, engine: EngineRecord, why: str | EngineError) -> None:
        """Take an engine out of the traffic until an update succeeds; its requests are given up.

        One that does not take our key is out for good, and one of ours that gave an impossible
        answer is to be restarted.
        """
        error = why if isinstance(why, EngineError) else EngineError(why)
        if error.refused and engine.process is None:
            self.lock_out(engine, error)
            return
        death = engine.process.exited(DEATH_S) if engine.process is not None else None
        with self.lock:
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

    def lay_off(self, engine: EngineRecord, reason: str, start_at: float | None = None) -> None:
        """Take an engine of ours out of the traffic until another process has its place.

        Args:
            start_at: time of the next attempt; None: at once, by ``begin``.
        """
        with self.lock:
            engine.state, engine.reason, engine.start_at = "starting", reason, start_at
            engine.failures += 1

    def lock_out(self, engine: EngineRecord, error: EngineError) -> None:
        """Leave out an engine that does not take our key; the run continues with the others."""
        with self.lock:
            if engine.state != "gone":
                engine.refuses = True
                self.leave(engine, "gave up", f"{error}; give its API key in {API_KEY}")

    def withdraw(self, engine: EngineRecord) -> None:
        """Leave out an engine that the batch system took away."""
        with self.lock:
            engine.withdrawn = True
            self.leave(engine, "left", "it is gone from the rendezvous")

    def leave(self, engine: EngineRecord, event: str, message: str) -> None:
        with self.lock:
            engine.state, engine.reason = "gone", message
            engine.failures += 1
            if event == "gave up" and engine.process is None:
                self.barred.add(engine.url)
            self.note(event, engine, message)
            if engine.process is None:
                self.on_leave(engine)

    def note(self, event: str, engine: EngineRecord | None, message: str) -> None:
        """Events: started, failed, died, restarted, joined, left, gave up, retried,
        aborted."""
        with self.lock:
            self._events.append(
                {
                    "time": now(),
                    "event": event,
                    "engine": "" if engine is None else engine.name,
                    "message": message,
                }
            )

    def count(self, name: str, number: int = 1) -> None:
        with self.lock:
            self._counts[name] += number

    def drain(self) -> tuple[list[dict], dict[str, float]]:
        """Return the events since the last call, in order, and the metrics of that time."""
        with self.lock:
            events, self._events = self._events, []
            counts = {f"fleet/{name}": float(number) for name, number in self._counts.items()}
            self._counts = dict.fromkeys(self._counts, 0)
            return events, {"fleet/serving": float(len(self.serving())), **counts}

    def adopt(self, url: str, api_key: str | None) -> None:
        with self.lock:
            engine = EngineRecord(f"engine-{len(self._engines)}")
            engine.client = self._client(url, api_key)
            engine.started_at = self.clock()
            self._engines.append(engine)

    def begin(self, engine: EngineRecord) -> None:
        """Start a process of an engine in the place of one that has ended."""
        assert engine.process is not None, "an adopted one is not ours to start"
        with self.lock:
            engine.reset(self.publications, self.clock())
        try:
            engine.process.start()
        except ConfigError as error:
            self.leave(engine, "gave up", str(error))

    def locate(self, engine: EngineRecord, port: int) -> None:
        """Connect to a started engine, which said where it listens."""
        host = self.config.engine_host
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        with self.lock:
            engine.client = self._client(url, self.run_key)

    def arrived(self, engine: EngineRecord, info: Info) -> None:
        """Take in an engine that answers: ready, or serving where it cannot lack any weights."""
        # SGLang may leave it out; an embedded engine that does is of an older version.
        silent = info.loaders is None and info.kind.says is None
        if not (self.fixed or silent or LOADER in (info.loaders or ())):
            self.leave(
                engine,
                "gave up",
                f"{engine.url} does not have the weight loader of this version, and would fail in "
                "the first update; install this version of the package there, and start the engine "
                f"with {info.kind.serve}",
            )
            return
        if not self.fixed and info.scheme not in (None, self.scheme):
            self.leave(
                engine,
                "gave up",
                f"{engine.url} takes weights of scheme {info.scheme}, and this run publishes those "
                f"of quant.scheme={self.scheme}; start it with --scheme {self.scheme}, or set "
                "quant.scheme to its own",
            )
            return
        if not self.fixed and info.resamples:
            self.leave(
                engine,
                "gave up",
                f"{engine.url} samples from another distribution than this run trains on, by its "
                f"own {info.resamples}; start it without",
            )
            return
        with self.lock:
            engine.kind, engine.tp, engine.longest_input = info.kind, info.tp, info.longest_input
            empty = engine.process is not None and engine.kind.starts_empty and not self.fixed
            engine.state = "ready" if empty or self.version is not None else "serving"
            engine.version, engine.reason = None, ""
            self.note("restarted" if engine.restarts else "started", engine, f"at {engine.url}")

    def other_facts(self, computes: Mapping[str, Any] | None) -> str:
        """Return where an engine's model differs from the run's; "" where it does not, or the
        engine does not say."""
        differences = []
        for name, ours in (self.facts or {}).items():
            if computes and name in computes and computes[name] != ours:
                theirs = shortened(computes[name])
                differences.append(f"{name} is {theirs} there and {shortened(ours)} here")
        return ", ".join(differences)

    def _client(self, url: str, api_key: str | None) -> EngineClient:
        return EngineClient(url, timeout_s=self.config.timeout_s, api_key=api_key)
