"""Send the requests of a load, note when each token comes, publish in between, look at the engine.

One event loop has a connection per request, as many as the load wants; a publication runs in a
thread beside it, because it blocks. Nothing is tried again: a request that fails has failed.

Streams are read of SGLang's ``/generate`` and OpenAI's ``/v1/completions``. Prompts are token ids
in both, and temperature 1 without any cut, as in training. OpenAI's does not say which weights made
a token, nor which requests were preempted; it gives ids where the server supports
``return_token_ids``. An embedded engine has no streams: its answers come whole, and do not tell
when each token came.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from qurl_megatron.bench.rollout_load import Ask, LoadOutcome, Look, Publication, TimedAnswer
from qurl_megatron.fleet.answer import answer_limit, parsed
from qurl_megatron.fleet.client import EngineClient, EngineError, Session
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.event_loop import run
from qurl_megatron.kit.record import shortened

LOOK_S = 0.25  # between two looks at the engine
TICK_S = 0.01  # between two looks at whether to publish

Looking = Callable[[Session], Awaitable[Look]]
Publish = Callable[[], tuple[str, float]]
"""Brings the engine one more version; its name, and for how many seconds it paused."""


@dataclass(frozen=True)
class Protocol:
    endpoint: str
    body: Callable[[Ask, str], dict]  # of a request to the model of that name
    read: Callable[[TimedAnswer, Any, float], None]  # one event, at its time
    streams: bool = True


def _params(ask: Ask) -> dict:
    return {"max_new_tokens": ask.tokens, "ignore_eos": True, "temperature": 1.0}


def _sglang_body(ask: Ask, model: str) -> dict:
    return {"input_ids": list(ask.prompt), "sampling_params": _params(ask), "stream": True}


async def _whole(session: Session, ask: Ask) -> AsyncGenerator[Any, None]:
    """Yield an embedded engine's answer, as the one event of a stream."""
    limit, rid = answer_limit([ask.tokens]), uuid.uuid4().hex
    [answer] = await session.generate([ask.prompt], [_params(ask)], [rid], parsed, limit=limit)
    yield answer


def _read_embedded(answer: TimedAnswer, event: Any, at: float) -> None:
    _read_sglang(answer, event, at)
    answer.first_of.clear()  # the time belongs to the last token


def _read_sglang(answer: TimedAnswer, event: Any, at: float) -> None:
    if _failed(answer, event):
        return
    ids, meta = event["output_ids"], event["meta_info"]
    # Servers send either all tokens so far or, if asked, the new ones.
    if len(ids) >= meta["completion_tokens"]:
        answer.ids = ids
    else:
        answer.ids += ids
    answer.came(len(answer.ids), at)
    answer.cached = meta.get("cached_tokens")
    answer.preempted = meta.get("num_retractions") or 0
    if answer.ids:
        spans = meta.get("weight_versions")
        name = spans[-1]["version"] if spans else meta.get("weight_version")
        answer.first_of.setdefault(str(name), at)
    finish = meta.get("finish_reason")
    if finish and finish["type"] == "abort":
        answer.failure = f"aborted: {shortened(finish.get('message') or '')}"


def _openai_body(ask: Ask, model: str) -> dict:
    return {
        "model": model,
        "prompt": list(ask.prompt),
        "max_tokens": ask.tokens,
        "ignore_eos": True,
        "temperature": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def _read_openai(answer: TimedAnswer, event: Any, at: float) -> None:
    if _failed(answer, event):
        return
    for choice in event.get("choices", ()):
        ids = choice.get("token_ids")
        if ids:
            answer.ids += ids
        # Without ids an event is a token, until the usage at the end says how many there were.
        new = len(ids) if ids is not None else bool(choice.get("text"))
        answer.came(answer.tokens + new, at)
        if choice.get("finish_reason") == "abort":
            answer.failure = "aborted"
    if usage := event.get("usage"):
        total = usage["completion_tokens"]
        answer.came(total, at)
        answer.counts = [min(count, total) for count in answer.counts]
        details = usage.get("prompt_tokens_details") or {}
        answer.cached = details.get("cached_tokens")


def _failed(answer: TimedAnswer, event: Any) -> bool:
    error = event.get("error")
    if error:
        message = error.get("message") if isinstance(error, dict) else error
        answer.failure = shortened(str(message))
    return bool(error)


PROTOCOLS = {
    "embedded": Protocol("/generate", _sglang_body, _read_embedded, streams=False),
    "sglang": Protocol("/generate", _sglang_body, _read_sglang),
    "openai": Protocol("/v1/completions", _openai_body, _read_openai),
}


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
            client: its time limit is for a whole response.
            model: name that OpenAI's protocol wants.
        """
        self._client, self._protocol, self._model = client, protocol, model
        self._look, self._publishing = look, publishing
        self._outcome = LoadOutcome()
        self._start = 0.0

    def drive(self, asks: Sequence[Ask], at_once: int = 0) -> LoadOutcome:
        """Send all requests, ``at_once`` at a time; 0: all.

        Returns:
            The answers, each with its own failure, if any.
        """
        run(self._drive(asks, at_once or len(asks)))
        return self._outcome

    async def _drive(self, asks: Sequence[Ask], at_once: int) -> None:
        waiting = iter(asks)
        async with self._client.session() as session:
            cpu_s, self._start = time.process_time(), time.perf_counter()
            watching = asyncio.create_task(self._watch(session))
            finished = asyncio.Event()
            publisher = asyncio.create_task(self._publish(finished))
            await asyncio.gather(*(self._one_by_one(session, waiting) for _ in range(at_once)))
            self._outcome.client_cpu_s = time.process_time() - cpu_s
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            finished.set()
            await publisher

    @property
    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _one_by_one(self, session: Session, waiting: Iterator[Ask]) -> None:
        for ask in waiting:
            answer = TimedAnswer(ask, began=self._now)
            self._outcome.answers.append(answer)
            endpoint = self._protocol.endpoint
            if self._protocol.streams:
                events = session.events(endpoint, self._protocol.body(ask, self._model))
            else:
                events = _whole(session, ask)
            try:
                async with contextlib.aclosing(events):
                    async for event in events:
                        self._protocol.read(answer, event, self._now)
            except EngineError as error:  # kept as failed, and never counted as done
                answer.failure = answer.failure or str(error)
            except (KeyError, TypeError, AttributeError) as error:  # against the protocol
                answer.failure = f"{endpoint} sent a malformed event ({error!r})"
            answer.ended = self._now

    async def _watch(self, session: Session) -> None:
        while self._look:
            try:
                self._outcome.looks.append(await self._look(session))
            except EngineError as error:  # one that is busy with an update may not answer now
                self._outcome.unseen = self._outcome.unseen or str(error)
            except (LookupError, TypeError, ValueError) as error:  # and never will be read
                reason = f"what the engine says of itself cannot be read ({error!r})"
                self._outcome.unseen = self._outcome.unseen or reason
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
