"""Prompts in, samples out, whatever happens to the engines on the way.

The samples of one prompt form a group: they travel together and share its prefill. Each group is
with one engine at a time; if that engine fails, the group's unfinished responses go to another, so
that no sample is lost and none comes twice. A response that was aborted is continued: its prompt
and the tokens so far are sent on, and the sample joins the parts, each token with the log-prob and
the weight version it was generated with.

With an environment, a response that ended goes to it, and back to the engines with its reply, as
often as the conversation has turns. The samples of a prompt do so independently.

Embedded engines get all of their groups in one request, prompt i at engine i modulo their number,
and every sample has its own seed: while nothing fails, such a run repeats bit for bit. For the same
reason they get the next turns of all their conversations in one request. SGLang engines get one
request per group, later one per conversation, the least loaded engine first, and no more than they
can hold.
"""

import asyncio
import contextlib
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qurl_megatron.config.sections import RolloutConfig
from qurl_megatron.fleet.answer import (
    NEUTRAL,
    Asked,
    Part,
    Routed,
    Rules,
    answer_limit,
    read_answers,
)
from qurl_megatron.fleet.client import EngineClient, EngineError, generations
from qurl_megatron.fleet.fleet import EngineRecord, Fleet
from qurl_megatron.fleet.turns import Response, Turns, hash63
from qurl_megatron.kit import event_loop
from qurl_megatron.kit.errors import Interrupted
from qurl_megatron.kit.record import Malformed
from qurl_megatron.observe.text import how_many
from qurl_megatron.types import Prompt, Sample

POLL_S = 0.2  # how often ``stop`` is asked, and engines are looked at
EVALUATION = 0  # the step that seeds of evaluation are made with; training steps begin with 1

Finished = Callable[[list[Sample]], None]
"""Called with a prompt's samples; it must return at once, since no engine gets work meanwhile."""


def collect(
    fleet: Fleet,
    prompts: Sequence[Prompt],
    config: RolloutConfig,
    *,
    seed: int,
    step: int,
    stop: Callable[[], bool] | None = None,
    top_p: float = 1.0,
    finished: Finished | None = None,
    turns: Turns | None = None,
) -> list[Sample]:
    """Return ``samples_per_prompt`` samples for every prompt, prompt-major; thread-safe.

    Args:
        top_p: share of the probability that tokens are drawn from. For evaluation alone: below 1
            the log-probs do not belong to the sampling distribution.
        finished: called with the samples of each prompt when the last of them is complete.
        turns: the environment; None: a response is one turn.

    Raises:
        Interrupted: ``stop()`` became true.
        EngineError: no engine is left, or no engine can answer a request.
        ConfigError: the environment cannot be used.
    """
    groups = []
    for prompt in prompts:
        group = []
        for sample in range(config.samples_per_prompt):
            params = {
                "temperature": config.temperature,
                "max_new_tokens": config.max_new_tokens,
                "sampling_seed": sample_seed(seed, step, prompt.index, sample),
                **NEUTRAL,
                "top_p": top_p,
            }
            group.append(Response(prompt, params))
        groups.append(group)
    routed = fleet.routed if step != EVALUATION else None  # nobody trains on those
    return event_loop.run(_Collection(fleet, groups, stop, finished, turns, routed).run())


def greedy(
    fleet: Fleet,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    stop: Callable[[], bool] | None = None,
    finished: Finished | None = None,
    turns: Turns | None = None,
) -> list[Sample]:
    """Return one greedily decoded sample per prompt, for evaluation."""
    params = {"temperature": 0.0, "max_new_tokens": max_new_tokens, **NEUTRAL}
    groups = [[Response(prompt, params)] for prompt in prompts]
    return event_loop.run(_Collection(fleet, groups, stop, finished, turns).run())


def sample_seed(seed: int, step: int, prompt_index: int, sample: int) -> int:
    """Return one sample's seed: the first 63 bits of BLAKE2b of "seed/step/prompt_index/sample".

    Stable across machines, Python versions and engines, unlike ``hash``.
    """
    return hash63(f"{seed}/{step}/{prompt_index}/{sample}")


@dataclass(eq=False)
class _Flight:
    """One request under way: its items, and the engine that has them."""

    items: list[Response]
    engine: EngineRecord
    failures: int  # of the engine when the request was sent: more now means that it has failed
    version: int | None  # that the engine had confirmed then: an answer cannot be older

    @property
    def lost(self) -> bool:
        return self.engine.failures != self.failures


class _Collection:
    """The requests of one call, on an event loop of its own."""

    def __init__(
        self,
        fleet: Fleet,
        groups: list[list[Response]],
        stop: Callable[[], bool] | None,
        finished: Finished | None,
        turns: Turns | None,
        routed: Routed | None = None,
    ) -> None:
        self.routed = routed
        self.fleet, self.groups, self.stop, self.finished = fleet, groups, stop, finished
        self.turns, self.most_turns = turns, 1
        if turns is not None:
            self.most_turns = turns.pool.config.max_turns
        # With the environment: items, and the engine that gets their next turns (None: any).
        self.talks: dict[asyncio.Future, tuple[list[Response], EngineRecord | None]] = {}
        self.group_of = {item: group for group in groups for item in group}
        self.tag = uuid.uuid4().hex
        self.limit: int | None = fleet.config.requests_per_engine  # responses in flight per engine
        # Waiting for an engine: items, and which one (None: the least loaded).
        self.waiting: deque[tuple[list[Response], EngineRecord | None]] = deque()
        self.flights: dict[asyncio.Future, _Flight] = {}
        self.sent = 0
        # Responses that left a failed engine since the last look.
        self.moved: Counter[EngineRecord] = Counter()

    async def run(self) -> list[Sample]:
        async with generations() as self.http:
            try:
                self._deal()
                while self.waiting or self.flights or self.talks:
                    self._launch()
                    await self._settle()
                    await self._look()
            finally:
                await self._give_up()
        return [item.sample() for group in self.groups for item in group]

    def _deal(self) -> None:
        """Queue a share for each engine if all engines repeat, otherwise group by group."""
        serving = self.fleet.serving()
        repeat = all(engine.kind.repeats for engine in serving)
        if repeat:
            self.limit = None  # they queue by themselves
        if not (serving and repeat):
            self.waiting += [(group, None) for group in self.groups]
            return
        for index, engine in enumerate(serving):
            share: list[Response] = []
            for group in self.groups[index :: len(serving)]:
                share += group
            if share:
                self.waiting.append((share, engine))

    def _launch(self) -> None:
        """Send waiting items to engines that have room."""
        while self.waiting:
            items, engine = self.waiting[0]
            size = _tokens(items), len(items)
            engine = self.fleet.take(*size, limit=self.limit, wanted=engine)
            if engine is None:
                if not self.fleet.serving():
                    raise EngineError(f"no engine is serving: {self.fleet.why_not()}")
                return  # all are full
            self.waiting.popleft()
            flight = _Flight(items, engine, engine.failures, engine.version)
            task = asyncio.create_task(self._fly(flight, engine.api, self.sent))
            self.flights[task] = flight
            self.sent += 1

    async def _fly(
        self, flight: _Flight, client: EngineClient, number: int
    ) -> list[Part | Malformed]:
        fleet, requests = self.fleet, [item.request() for item in flight.items]
        expected = []
        for index, (item, (ids, _)) in enumerate(zip(flight.items, requests, strict=True)):
            expected.append(Asked(f"{self.tag}-{number}-{index}", item.budget, len(ids)))

        def read(content: bytes) -> list[Part | Malformed]:
            rules = Rules(
                fleet.vocabulary,
                fleet.names,
                flight.version,
                fleet.newest,
                fleet.stops,
                flight.engine.longest_input,
                self.routed,
            )
            return read_answers(content, expected, rules)

        return await client.generate(
            self.http,
            [ids for ids, _ in requests],
            [params for _, params in requests],
            [request.rid for request in expected],
            read,
            limit=answer_limit(expected, self.routed),
            routed=self.routed is not None,
            # Never share prefixes that other weights computed, flushed or not.
            cache_key=str(flight.version) if flight.engine.kind.shares_prefixes else None,
        )

    async def _settle(self) -> None:
        """Take answers, and send on the items that they left unfinished."""
        if not (self.flights or self.talks):
            await asyncio.sleep(POLL_S)  # the engines are full with requests of other callers
            return
        finished, _ = await asyncio.wait(
            [*self.flights, *self.talks], timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
        )
        for task in finished & self.talks.keys():
            items, engine = self.talks.pop(task)
            task.result()
            self._tell(items)
            self._send_on(items, engine)
        for task in finished & self.flights.keys():
            flight = self.flights[task]
            # An engine that failed may have answered from weights that it has not confirmed.
            if not flight.lost:
                await self._land(flight, task)
            else:
                task.exception()  # retrieved, or Python prints it when the task is dropped
            self._end(task)

    async def _land(self, flight: _Flight, task: asyncio.Future) -> None:
        try:
            parts = task.result()
        except EngineError as error:
            if error.ours and len(self.fleet.serving()) < 2:
                raise  # there is no second engine to try
            await self._fail(flight, error)
            return
        bad = None
        for item, part in zip(flight.items, parts, strict=True):
            if isinstance(part, Part):
                item.take(part, max_turns=self.most_turns)
            elif bad is None:
                url, prompt = flight.engine.url, item.prompt.index
                bad = EngineError(f"{url} answered prompt {prompt}: {part}", faulty=True)
        if bad is not None:
            await self._fail(flight, bad)

    async def _fail(self, flight: _Flight, error: EngineError) -> None:
        # A false answer, or a refused key, is not the request's fault. But where nothing is
        # published the engine is back at once, and would get the request again without end.
        if self.fleet.fixed or not (error.faulty or error.refused):
            for item in flight.items:
                if not (item.finish or item.ended):
                    item.failed(str(error))
        await asyncio.to_thread(self.fleet.fail, flight.engine, error)

    def _end(self, task: asyncio.Future) -> None:
        """Free the engine of a flight's items, and pass each item on."""
        flight = self.flights.pop(task)
        items, engine = flight.items, flight.engine
        self.fleet.vacate(engine, _tokens(items), len(items))
        self._tell(items)
        ended = [item for item in items if item.ended]
        if engine.kind.repeats and not flight.lost:
            self._converse(ended, engine)
        else:
            for item in ended:
                self._converse([item], None)
        moved = self._send_on(items)
        if flight.lost:
            self.moved[engine] += moved

    def _tell(self, items: list[Response]) -> None:
        """Report the groups that are whole now.

        Each is reported once: a finished item is not sent again, so a group is whole for the first
        time when its last item comes in.
        """
        if self.finished is None:
            return
        for group in {id(group): group for group in (self.group_of[i] for i in items)}.values():
            if all(item.finish for item in group):
                self.finished([item.sample() for item in group])

    def _converse(self, ended: list[Response], engine: EngineRecord | None) -> None:
        """Have the environment reply to turns that ended; ``engine`` gets the next ones."""
        if ended:
            assert self.turns is not None, "no turn ends without an environment"
            talk = asyncio.gather(*(item.converse(self.turns) for item in ended))
            self.talks[talk] = ended, engine

    def _send_on(self, items: list[Response], engine: EngineRecord | None = None) -> int:
        """Queue unfinished items before all others; return their number."""
        unfinished = [item for item in items if not (item.finish or item.ended)]
        if unfinished:
            self.waiting.appendleft((unfinished, engine))
        return len(unfinished)

    async def _look(self) -> None:
        """Stop if asked; take requests back from engines that failed."""
        at_work = self.flights or self.waiting or self.talks
        if self.stop is not None and at_work and self.stop():
            raise Interrupted("stopped while engines were generating")
        for task, flight in list(self.flights.items()):
            if flight.lost:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                self._end(task)
        for engine, number in self.moved.items():
            self.fleet.count("retries", number)
            self.fleet.note(
                "retried", engine, f"{how_many(number, 'response')} to be finished elsewhere"
            )
        self.moved.clear()

    async def _give_up(self) -> None:
        """Abort all requests, or engines would go on computing what nobody waits for."""
        flights = list(self.flights.values())
        for task in [*self.flights, *self.talks]:
            task.cancel()
        await asyncio.gather(*self.flights, *self.talks, return_exceptions=True)
        for flight in flights:
            self.fleet.vacate(flight.engine, _tokens(flight.items), len(flight.items))
        for engine in {flight.engine for flight in flights if not flight.lost}:
            # Where it is dead or hung, the error that brought us here says more.
            with contextlib.suppress(EngineError):
                await asyncio.to_thread(engine.api.abort, f"{self.tag}-")


def _tokens(items: Sequence[Response]) -> int:
    """Return the most tokens that an engine's cache will hold for them."""
    return sum(len(item.prompt.input_ids) + item.params["max_new_tokens"] for item in items)
