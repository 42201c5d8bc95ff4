"""The run's end of leases: which adopted engines are its own, for as long as it renews them.

A thread renews them, because nobody else has the time: publications take minutes, and the
supervisor waits for them.
"""

import threading
from typing import TYPE_CHECKING

from qurl_megatron.rollout.client import EngineClient, EngineError
from qurl_megatron.rollout.engine import Engine
from qurl_megatron.rollout.lease import Owner

if TYPE_CHECKING:
    from qurl_megatron.rollout.fleet import Fleet

LEASE_S = 30.0
RENEW_S = 5.0
ANSWER_S = 5.0  # for an engine to answer, which it does without a look at what it generates


class Tenancy:
    """Of one fleet. What it finds out about an engine it tells the fleet."""

    def __init__(self, fleet: "Fleet", owner: Owner) -> None:
        self._fleet, self._owner = fleet, owner
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tenancy", daemon=True)

    def claim(self, engine: Engine, client: EngineClient) -> None:
        """Make an adopted engine this run's; one whose run lives leaves the fleet.

        Raises:
            EngineError: it did not say, or its lease may yet lapse: to be asked again.
        """
        fleet = self._fleet
        if fleet.fixed or engine.process is not None or engine.ours:
            return
        take_over = fleet.config.take_over
        verdict = client.lease(self._owner, LEASE_S, take_over=take_over, timeout_s=ANSWER_S)
        if verdict is None or verdict.granted:
            engine.ours = verdict is not None
            return
        before, engine.leased_s = engine.leased_s, verdict.left_s
        if before is None or verdict.left_s <= before:
            raise EngineError(
                f"{engine.url} belongs to {verdict.label} for {verdict.left_s:.0f} s more, unless "
                "that run renews its lease"
            )
        fleet.leave(
            engine,
            "gave up",
            f"{engine.url} belongs to a run that is at work ({verdict.label}); give this run "
            "engines of its own, stop that one, or set rollout.take_over=true",
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Give the engines back, so that the next run need not wait for leases to lapse."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._each(lambda engine: engine.client.lease(self._owner, 0, timeout_s=ANSWER_S))

    def _run(self) -> None:
        while not self._stopping.wait(RENEW_S):
            self._each(self._renew)

    def _renew(self, engine: Engine) -> None:
        verdict = engine.client.lease(self._owner, LEASE_S, timeout_s=ANSWER_S)
        if verdict is not None and not verdict.granted:
            engine.ours = False
            taken = f"{engine.url} was taken over by another run ({verdict.label})"
            self._fleet.leave(engine, "gave up", taken)

    def _each(self, act) -> None:
        """``act`` on the engines that are this run's, at once."""

        def run(engine: Engine) -> None:
            try:
                act(engine)
            except EngineError:
                return  # silent or gone, which its health checks tell; its lease has some time

        held = [engine for engine in self._fleet.engines() if engine.ours]
        threads = [threading.Thread(target=run, args=(engine,), daemon=True) for engine in held]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ANSWER_S)
