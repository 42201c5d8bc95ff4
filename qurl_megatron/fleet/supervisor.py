"""The thread that looks after the engines, every quarter of a second.

It notices faults that no request shows: an idle engine that died, one that is stopped or hangs, one
that the batch system added or took away. It acts between publications only, so weights never go to
an engine that is being killed, and an engine busy with an update is not taken for hung.

A health check asks for ``/server_info``, which the engine's own loop answers, paused or not.
SGLang's ``/health`` generates a token, and fails while the engine is paused.

Neither a start nor a silence is judged by the clock alone: an engine that compiles kernels, loads
weights or captures graphs takes minutes, answers nothing, and writes to its log.
"""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from qurl_megatron.fleet.client import EngineClient, EngineError, deadline
from qurl_megatron.fleet.roster import EngineRecord, Roster
from qurl_megatron.fleet.tenancy import Tenancy, WrongEntry, read_members
from qurl_megatron.kit.errors import ConfigError, Interrupted
from qurl_megatron.kit.stop import stop_comes
from qurl_megatron.observe.text import how_many

LOOK_S = 0.25
RETRY_S = 0.5  # between checks of an engine that gave no good answer
BACK_OFF_S = 1.0  # before the first restart; twice as long before each next
LONGEST_BACK_OFF_S = 60.0
TOLD_AFTER_S = 1.0  # of waiting for engines that were not started here
ABSENT_S = 1.0  # after which an engine has left the rendezvous
PATIENCE = 2  # updates that an engine may fail in a row before it is restarted
IN_ALL = 4  # times its limit, after which an engine that still writes to its log is late, or hung


class Supervisor:
    """Heals a fleet until stopped."""

    def __init__(self, roster: Roster, tenancy: Tenancy) -> None:
        self._roster, self._config, self._tenancy = roster, roster.config, tenancy
        self._clock = roster.clock
        self._rendezvous = Path(self._config.rendezvous) if self._config.rendezvous else None
        self._complaints: list[str] = []  # about the rendezvous as it is, each said once
        self._places: dict[str, str] = {}  # by URL, where its entry in the rendezvous was
        self._absent: dict[str, float] = {}  # by URL, when an engine was first missed there
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def gather(self, timeout_s: float, stop: Callable[[], bool]) -> None:
        """Wait for the engines a run begins with.

        One that does not take our key is left out where another does.

        Raises:
            Interrupted: ``stop()`` became true.
            ConfigError: one cannot be this run's, or none takes our key.
            EngineError: one died or did not come up in time.
        """
        roster, end = self._roster, self._clock() + timeout_s
        untold_until = end - timeout_s + TOLD_AFTER_S
        enough = self._config.engines if self._rendezvous else 1
        while True:
            if stop():
                raise Interrupted("stopped while engines were waited for")
            self._look()
            engines = roster.engines()
            for engine in engines:
                if engine.process and (death := engine.process.exited()):
                    if stop_comes(stop):
                        raise Interrupted("stopped while engines were waited for")
                    raise EngineError(f"{engine.name} {death}")
            if reasons := roster.refusals():
                raise ConfigError("; ".join(reasons))
            if reason := roster.locked_out():
                raise ConfigError(reason)
            waiting = [engine for engine in engines if engine.state == "starting"]
            if not waiting and len(engines) >= enough:
                return
            now, late = self._clock(), []
            for engine in waiting:
                # An adopted engine has no log, and the same time as the others.
                since = end - timeout_s if engine.process is None else engine.started_at
                if overdue(_heard(engine, since), since, timeout_s, now):
                    late.append(_lateness(engine, timeout_s, now))
            if late:
                raise EngineError("; ".join(late))
            if not waiting and now > end:
                complaints = "; ".join(self._complaints)
                raise EngineError(
                    f"rollout.rendezvous {self._rendezvous} offers {len(engines)} of "
                    f"{enough} engines after {timeout_s:.0f} s {complaints}".rstrip()
                )
            if now > untold_until:
                untold_until = end
                self._tell(waiting, len(engines), enough, timeout_s)
            self._stopping.wait(RETRY_S / 10)

    def _tell(self, waiting: list[EngineRecord], there: int, wanted: int, timeout_s: float) -> None:
        """Name the engines that a run waits for and has not started itself."""
        limit = f"for {timeout_s:g} s at most (rollout.start_timeout_s)"
        for engine in [engine for engine in waiting if engine.process is None]:
            state = engine.pulse.error or "no answer yet"
            print(f"waiting for {engine.url} {limit}: {state}", flush=True)
        if there < wanted:
            print(f"waiting for {wanted - there} of {wanted} engines {limit}", flush=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_S):
            self.look_after()

    def look_after(self) -> None:
        """Look at every engine once, and heal those that need it; not during a publication."""
        # Never wait for a publication here: close() waits for this thread.
        if self._roster.turn.acquire(blocking=False):
            try:
                self._look()
                self._heal()
            finally:
                self._roster.turn.release()

    def _look(self) -> None:
        """Membership, and a health check for each engine where one is due."""
        if self._rendezvous is not None:
            self._meet(self._rendezvous)
        for engine in self._roster.engines():
            if engine.process is not None:
                engine.process.heard()
            if engine.client is None and engine.process is not None and engine.start_at is None:
                port = engine.process.port()
                if port is None:
                    continue
                self._roster.locate(engine, port)
            pulse = engine.pulse
            if pulse.epoch != self._roster.publications:
                pulse.epoch, pulse.silent_since = self._roster.publications, None
                pulse.sent, pulse.due = None, 0.0
            if engine.client is not None:
                self._ask(engine, engine.client)

    def _ask(self, engine: EngineRecord, client: EngineClient) -> None:
        """Send a health check where one is due; one that is out for too long is a silence."""
        pulse, now = engine.pulse, self._clock()
        limit_s = self._health_limit_s(engine)
        with self._roster.lock:
            if pulse.sent is None and now >= pulse.due:
                pulse.sent = now
                snapshot = (engine, client, pulse.epoch, now, limit_s)
                threading.Thread(target=self._check, args=snapshot, daemon=True).start()
            elif pulse.sent is not None and now > pulse.sent + limit_s + LOOK_S:
                # Stuck where no deadline reaches, as where it waits for a lease to be given back.
                pulse.silent_since = pulse.silent_since or pulse.sent
                pulse.error = EngineError(f"{engine.url}: its health check has not come back")

    def _check(
        self, engine: EngineRecord, client: EngineClient, epoch: int, sent: float, limit_s: float
    ) -> None:
        error = None
        try:
            with deadline(limit_s):
                info = client.info(limit_s)
                if engine.state == "starting":
                    self._tenancy.claim(engine, client)
                    if engine.process is not None:
                        engine.process.look()
        except EngineError as failure:
            error = failure
            if error.refused and engine.process is None:
                self._roster.lock_out(engine, error)
        with self._roster.lock:
            pulse = engine.pulse
            if engine.client is not client or pulse.epoch != epoch:
                return  # about a process, or weights, that are gone
            pulse.sent, pulse.healthy, pulse.error = None, error is None, error
            if error is None:
                pulse.silent_since = None
                pulse.due = self._clock() + self._config.health_every_s
                # One that failed is back with the next version, where there is one to come.
                healed = engine.state == "stale" and self._roster.fixed
                if engine.state == "starting" or healed:
                    self._roster.arrived(engine, info)
            else:
                pulse.silent_since = pulse.silent_since or sent
                pulse.due = self._clock() + RETRY_S

    def _heal(self) -> None:
        now = self._clock()
        for engine in self._roster.engines():
            silent = engine.pulse.silent_since  # read once: an answer may come meanwhile
            if engine.start_at is not None:
                # A colocated engine must not come up in memory that is the trainer's now.
                if now >= engine.start_at and not self._roster.released:
                    self._restart(engine)
            elif engine.process is not None and (death := engine.process.exited()):
                self._died(engine, death)
            elif engine.state == "starting":
                limit_s, process = self._config.start_limit_s, engine.process
                if process and overdue(process.heard(), engine.started_at, limit_s, now):
                    self._roster.note("failed", engine, _lateness(engine, limit_s, now))
                    process.kill()
            elif silent is None:
                hopeless = engine.condemned or engine.failed_updates >= PATIENCE
                if engine.process is not None and hopeless:
                    engine.process.kill()
            elif overdue(_heard(engine, silent), silent, self._health_limit_s(engine), now):
                self._roster.fail(
                    engine,
                    f"no health check was answered for {now - silent:.0f} s ({engine.pulse.error})",
                )
                if engine.process is not None:
                    engine.process.kill()

    def _health_limit_s(self, engine: EngineRecord) -> float:
        return self._config.health_timeout_s or engine.kind.health_timeout_s

    def _died(self, engine: EngineRecord, death: str) -> None:
        roster = self._roster
        with roster.lock:
            roster.note("died", engine, death)
            if engine.restarts >= self._config.max_restarts:
                roster.leave(
                    engine, "gave up", f"after {how_many(engine.restarts, 'restart')}; it {death}"
                )
                return
            reason = engine.reason if engine.condemned else death  # it was killed for the former
            roster.lay_off(engine, reason, start_at=self._clock() + back_off(engine.restarts))

    def _restart(self, engine: EngineRecord) -> None:
        assert engine.process is not None, "an adopted one is not restarted"
        engine.process.kill()  # children that outlived it hold its memory
        with self._roster.lock:
            engine.restarts += 1
            self._roster.count("restarts")
        self._roster.begin(engine)

    def _meet(self, rendezvous: Path) -> None:
        """Adopt engines that are new at the rendezvous, and withdraw those gone from it."""
        roster = self._roster
        entries: list[WrongEntry] = []  # or half written: each is read again with the next look
        try:
            members = read_members(rendezvous, entries.append)
        except ConfigError as error:  # who is there is not known, nor who is gone
            self._complain([error])
            return
        wrong: list[Exception] = [*entries]
        by_url = {engine.url: engine for engine in roster.engines()}
        roster.barred &= members.keys()
        for url, member in members.items():
            if url not in by_url and url not in roster.barred:
                try:
                    roster.adopt(url, member.api_key() or roster.api_key)
                except (ConfigError, EngineError) as error:
                    wrong.append(error)
        self._places |= {url: member.place for url, member in members.items()}
        unreadable = {entry.place for entry in entries}
        gone = {url for url in by_url.keys() - members if self._places.get(url) not in unreadable}
        now = self._clock()
        self._absent = {url: self._absent.get(url, now) for url in gone}
        for url, since in self._absent.items():
            if now >= since + ABSENT_S:  # a file that is being rewritten is empty for a moment
                roster.withdraw(by_url[url])
        self._complain(wrong)

    def _complain(self, wrong: Iterable[Exception]) -> None:
        before, self._complaints = self._complaints, [str(error) for error in wrong]
        for complaint in self._complaints:
            if complaint not in before:
                self._roster.note("failed", None, complaint)


def back_off(restarts: int) -> float:
    """Return the seconds before the next restart."""
    return min(BACK_OFF_S * 2**restarts, LONGEST_BACK_OFF_S)


def overdue(sign_of_life: float, since: float, limit_s: float, now: float) -> bool:
    """Tell whether an engine that starts, or answers nothing, has had its time.

    It has ``limit_s`` after its last sign of life, and ``IN_ALL`` times that in all.

    Args:
        sign_of_life: the last time that its log grew.
        since: when it was started, or asked.
    """
    return now > max(since, sign_of_life) + limit_s or now > since + IN_ALL * limit_s


def _heard(engine: EngineRecord, otherwise: float) -> float:
    return otherwise if engine.process is None else engine.process.heard()


def _lateness(engine: EngineRecord, limit_s: float, now: float) -> str:
    """Name the engines that were waited for, and how long."""
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
