"""One engine as the fleet sees it: where it is, what it serves, how it fares.

    starting    its process comes up, or waits for its next attempt
    ready       healthy, but without the current weights: no traffic
    serving     confirmed on the current version
    stale       failed a request, an update or a health check: no traffic until an update succeeds
    gone        left the fleet for good

Only the fleet changes states, under its lock.
"""

import time
from dataclasses import dataclass, field
from typing import Literal

from qurl_megatron.engines.kinds import UNKNOWN, EngineKind
from qurl_megatron.fleet.client import EngineClient, EngineError
from qurl_megatron.fleet.process import EngineProcess

State = Literal["starting", "ready", "serving", "stale", "gone"]


@dataclass
class Pulse:
    """Health checks of one engine; times are of the monotonic clock."""

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

    leased_s: float | None = None  # what another run's lease had left when it was last asked for
    ours: bool = False  # its lease is this run's

    released: bool = False  # its device memory is the trainer's

    in_flight: int = 0  # responses asked of it
    tokens_in_flight: int = 0  # prompt tokens, and at most that many new ones
    tokens: int = 0  # received from it
    failures: int = 0  # grows whenever its requests are given up
    failed_updates: int = 0  # in a row
    condemned: bool = False  # ours, and it said what cannot be true: to be restarted
    refuses: bool = False  # left because it does not take our key
    withdrawn: bool = False  # left because nobody offers it any more
    excused_until: float = 0.0  # not asked to take part before; of the monotonic clock
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
        """The client of one that has an address.

        Raises:
            EngineError: it has none: its process has not come up.
        """
        if self.client is None:
            raise EngineError(f"{self.name} has no address: its process has not come up")
        return self.client

    @property
    def load(self) -> float:
        """For comparing engines: tokens in flight per device."""
        return self.tokens_in_flight / self.tp

    @property
    def cause(self) -> str:
        """The reason without the end of a log, for a sentence on several engines."""
        return self.reason.partition("\n")[0].rstrip(":")

    def reset(self, epoch: int) -> None:
        """Forget the process that was: another one is about to start in its place.

        Args:
            epoch: the fleet's publications so far.
        """
        if self.client is not None:
            self.client.close()
        self.client, self.start_at, self.released = None, None, False
        self.failed_updates, self.condemned, self.served, self.pointers = 0, False, 0, ()
        self.pulse = Pulse(epoch=epoch)
        self.started_at = time.monotonic()

    def __str__(self) -> str:
        return f"{self.name} ({self.url})" if self.client else self.name
