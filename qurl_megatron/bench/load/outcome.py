"""What came of a load: each request's answer with its moments, and what was seen beside them.

All times are seconds after the load began, of one monotonic clock.
"""

from dataclasses import dataclass, field

from qurl_megatron.bench.load.requests import Ask

TOGETHER_S = 1e-4  # events closer than this came in one piece: their distance is this side's own


@dataclass
class TimedAnswer:
    """One request, as its events come in."""

    ask: Ask
    began: float  # when it was sent, or should have been: waiting for room is the engine's time
    times: list[float] = field(default_factory=list)  # at which tokens came
    counts: list[int] = field(default_factory=list)  # tokens after each of them
    ended: float | None = None
    failure: str = ""
    ids: list[int] = field(default_factory=list)  # where the protocol gives them
    cached: int | None = None  # prompt tokens that the engine did not compute
    preempted: int = 0  # times that it was taken back, to be computed again
    first_of: dict[str, float] = field(default_factory=dict)  # weights' name -> their first token

    @property
    def tokens(self) -> int:
        return self.counts[-1] if self.counts else 0

    @property
    def over(self) -> float:
        """When it ended, of one that has."""
        assert self.ended is not None
        return self.ended

    @property
    def done(self) -> bool:
        return self.ended is not None and not self.failure

    def came(self, count: int, at: float) -> None:
        """Now it has ``count`` tokens."""
        if count <= self.tokens:
            return
        if self.times and at - self.times[-1] < TOGETHER_S:
            self.counts[-1] = count
        else:
            self.times.append(at)
            self.counts.append(count)

    def had(self, at: float) -> int:
        """Tokens that it had at a time."""
        return max((c for c, t in zip(self.counts, self.times, strict=True) if t <= at), default=0)


@dataclass(frozen=True)
class Publication:
    """One new version of the weights, between two tokens."""

    name: str  # what the engine calls the weights
    began: float
    ended: float  # the engine resumes
    paused_s: float


@dataclass(frozen=True)
class Look:
    """What the engine said of itself at one moment; None: it does not say."""

    at: float
    running: int | None = None
    waiting: int | None = None
    occupancy: float | None = None  # share of the key/value cache that is in use
    preemptions: int | None = None  # since it started


@dataclass
class Client:
    """How busy this side was."""

    cpu_s: float = 0.0
    lags: list[float] = field(default_factory=list)  # by which the event loop woke too late


@dataclass
class LoadOutcome:
    """All that a load left."""

    answers: list[TimedAnswer] = field(default_factory=list)
    publications: list[Publication] = field(default_factory=list)
    unpublished: str = ""  # why a publication failed
    looks: list[Look] = field(default_factory=list)
    unseen: str = ""  # why the engine could not be looked at, the first time
    client: Client | None = field(default_factory=Client)  # None: another program sent the requests
    sender: str = ""  # that program; it reports each response's first and last token alone
    unasked: str = ""  # what it sent otherwise than it was asked to
