"""Send the requests, note when each token comes, publish in between, and look at both sides.

One event loop has a connection per request, as many as the load wants; a publication runs in a
thread beside it, because it blocks. Nothing is tried again: a request that fails has failed.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from qurl_megatron.bench.load.outcome import Client, LoadOutcome, Look, Publication, TimedAnswer
from qurl_megatron.bench.load.protocols import Protocol
from qurl_megatron.bench.load.requests import Ask
from qurl_megatron.errors import ConfigError
from qurl_megatron.fleet.client import EngineClient, EngineError, Session
from qurl_megatron.runtime.event_loop import run

LOOK_S = 0.25  # between two looks at the engine
TICK_S = 0.01  # between two looks at this side's event loop, and at whether to publish

Looking = Callable[[Session, float], Awaitable[Look]]
Publish = Callable[[], tuple[str, float]]
"""Brings the engine one more version; its name, and for how many seconds it paused."""


@dataclass(frozen=True)
class Publishing:
    """When to publish, and how."""

    publish: Publish
    seconds: float | None = None  # from one to the next
    tokens: int | None = None  # likewise
    once: bool = False


class DrivenLoad:
    """One load on one engine; use once."""

    def __init__(
        self,
        client: EngineClient,
        protocol: Protocol,
        model: str,
        *,
        look: Looking | None = None,
        publishing: Publishing | None = None,
    ) -> None:
        """
        Args:
            client: its time limit is what a whole response may take.
            model: name that OpenAI's protocol wants.
        """
        self._client, self._protocol, self._model = client, protocol, model
        self._look, self._publishing = look, publishing
        self._own = Client()
        self._outcome = LoadOutcome(client=self._own)
        self._start = 0.0

    def drive(self, asks: Sequence[Ask], at_once: int | None = None) -> LoadOutcome:
        """
        Args:
            at_once: requests that are under way at a time; None sends each when it is due.
        """
        run(self._drive(asks, at_once or len(asks)))
        return self._outcome

    async def _drive(self, asks: Sequence[Ask], at_once: int) -> None:
        waiting = iter(asks)
        async with self._client.session() as session:
            worked, self._start = time.process_time(), time.perf_counter()
            watching = [asyncio.create_task(self._watch_loop())]
            if self._look:
                watching.append(asyncio.create_task(self._watch_engine(session, self._look)))
            finished = asyncio.Event()
            publisher = asyncio.create_task(self._publish(finished))
            sending = (self._one_by_one(session, waiting) for _ in range(at_once))
            await asyncio.gather(*sending)
            self._own.cpu_s = time.process_time() - worked
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            finished.set()
            await publisher

    @property
    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _one_by_one(self, session: Session, waiting: Iterator[Ask]) -> None:
        for ask in waiting:
            if ask.due is not None:
                await asyncio.sleep(ask.due - self._now)
            answer = TimedAnswer(ask, began=self._now if ask.due is None else ask.due)
            self._outcome.answers.append(answer)
            endpoint, body = self._protocol.endpoint, self._protocol.body(ask, self._model)
            try:
                async with contextlib.aclosing(session.events(endpoint, body)) as events:
                    async for event in events:
                        self._protocol.read(answer, event, self._now)
            except EngineError as error:  # kept as failed, and never counted as done
                answer.failure = answer.failure or str(error)
            except (KeyError, TypeError, AttributeError) as error:  # not what the protocol says
                answer.failure = f"{endpoint} sent a malformed event ({error!r})"
            answer.ended = self._now

    async def _watch_loop(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK_S)
            self._own.lags.append(time.perf_counter() - before - TICK_S)

    async def _watch_engine(self, session: Session, look: Looking) -> None:
        while True:
            try:
                self._outcome.looks.append(await look(session, self._now))
            except EngineError as error:  # one that is busy with an update may not answer now
                self._outcome.unseen = self._outcome.unseen or str(error)
            except (LookupError, TypeError, ValueError) as error:  # and never will be read
                told = f"what the engine says of itself cannot be read ({error!r})"
                self._outcome.unseen = self._outcome.unseen or told
                return
            await asyncio.sleep(LOOK_S)

    async def _publish(self, finished: asyncio.Event) -> None:
        plan, since, tokens_then = self._publishing, 0.0, 0
        while plan is not None and not finished.is_set():
            tokens = sum(answer.tokens for answer in self._outcome.answers)
            late = plan.seconds is not None and self._now - since >= plan.seconds
            if late or (plan.tokens is not None and tokens - tokens_then >= plan.tokens):
                began = self._now
                try:
                    name, paused = await asyncio.to_thread(plan.publish)
                # The load continues, and says that it is not valid.
                except (EngineError, ConfigError, OSError) as error:
                    self._outcome.unpublished = str(error)
                    return
                self._outcome.publications.append(Publication(name, began, self._now, paused))
                since, tokens_then = self._now, tokens
                plan = None if plan.once else plan
            await asyncio.sleep(TICK_S)
