"""The load of a reinforcement-learning step: its requests, and how an engine answers them.

A prompt has several responses, as in a group of GRPO, each a request of its own with its own
length. All are asked for at once, as a step does, in whole answers. A step waits for the
**makespan**, from the first request to the last answer. Its **tail** is the share in which fewer
than half of the batch still run: the engine reads all its weights for few tokens. Only whole
answers count as tokens; a failed request has taken time, and made none.
"""

import asyncio
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
import numpy as np

from qurl_megatron.fleet.answer import Asked, answer_limit, parsed
from qurl_megatron.fleet.client import EngineClient, EngineError, generations
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.event_loop import run


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: tuple[int, ...]
    tokens: int  # the response has, neither more nor fewer


@dataclass(frozen=True)
class TimedAnswer:
    """The end of one request; all begin at 0."""

    ask: Ask
    ended: float  # seconds
    tokens: int = 0
    failure: str = ""


@dataclass
class LoadOutcome:
    answers: list[TimedAnswer] = field(default_factory=list)
    paused_s: list[float] = field(default_factory=list)  # of each publication

    @property
    def makespan(self) -> float:
        """Seconds from the first request to the end of the last."""
        return max(answer.ended for answer in self.answers)

    @property
    def tokens(self) -> int:
        """Tokens of whole answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def tail(self) -> float:
        """Share of the makespan in which fewer than half of the requests still run."""
        ends = sorted(answer.ended for answer in self.answers)
        return 1 - ends[len(ends) // 2] / ends[-1]

    def reasons(self) -> dict[str, str]:
        """Return the reasons not to count its figures, by name, with details."""
        count = len(self.answers)
        failed = [answer for answer in self.answers if answer.failure]
        wrong = [a for a in self.answers if not a.failure and a.tokens != a.ask.tokens]
        reasons = {}
        if failed:
            text = f"{len(failed)} of {count} requests; the first: {failed[0].failure}"
            reasons["failed requests"] = text
        if wrong:
            reasons["wrong lengths"] = (
                f"{len(wrong)} of {count} responses; the first has {wrong[0].tokens} tokens, where "
                f"{wrong[0].ask.tokens} were asked for"
            )
        return reasons


def drive(
    client: EngineClient,
    asks: Sequence[Ask],
    *,
    publish: Callable[[], float] | None = None,
    publications: int = 0,
) -> LoadOutcome:
    """Send all requests at once, and wait for their answers.

    Args:
        publish: brings the engine one more version, and returns for how many seconds it paused.
        publications: how often to call it, evenly over the tokens that have been answered.

    Raises:
        EngineError: the engine did not take a version.
    """
    outcome = LoadOutcome()
    total = sum(ask.tokens for ask in asks)

    async def answer_all() -> None:
        answered = 0
        async with generations() as http:
            start = time.perf_counter()
            requests = [asyncio.create_task(_answer(client, http, ask, start)) for ask in asks]
            for request in asyncio.as_completed(requests):
                answer = await request
                outcome.answers.append(answer)
                answered += answer.ask.tokens
                due = total * (len(outcome.paused_s) + 1) / (publications + 1)
                if publish and len(outcome.paused_s) < publications and answered >= due:
                    outcome.paused_s.append(await asyncio.to_thread(publish))  # it blocks

    run(answer_all())
    return outcome


async def _answer(
    client: EngineClient, http: aiohttp.ClientSession, ask: Ask, start: float
) -> TimedAnswer:
    params = {"max_new_tokens": ask.tokens, "ignore_eos": True, "temperature": 1.0}
    limit, rid = answer_limit([Asked("", ask.tokens)]), uuid.uuid4().hex
    tokens, failure = 0, ""
    try:
        [answer] = await client.generate(http, [ask.prompt], [params], [rid], parsed, limit=limit)
        tokens = len(answer["output_ids"])
    except EngineError as error:  # never sent again, and never counted as done
        failure = str(error)
    return TimedAnswer(ask, time.perf_counter() - start, tokens, failure)


def groups(
    lengths: Sequence[int], *, samples: int, prompt: int, vocab: int, seed: int
) -> list[Ask]:
    """Return requests in the order of their groups.

    Args:
        lengths: tokens of each response; a multiple of ``samples``.
        samples: responses per prompt.
        prompt: tokens of each prompt, random ones: no engine has any of them in its cache.
        vocab: of the model. Engines give meanings of their own to the first id and the last.
    """
    shape = (len(lengths) // samples, prompt)
    ids = np.random.default_rng(seed).integers(1, vocab - 1, shape)
    prompts = [tuple(row) for row in ids.tolist()]
    return [Ask(prompts[index // samples], length) for index, length in enumerate(lengths)]


def long_tailed(count: int, *, mean: float, longest: int) -> list[int]:
    """Return the tokens of ``count`` responses, in a mixed order that is always the same.

    They are the middle quantiles of a log-normal (sigma 1) that is cut off at the longest: the
    longest ones do not depend on a draw. The mean is taken over the lengths, cut and rounded. The
    longest hundredth has 9 % of all tokens, or 4 % where a mean of 64 is cut off at 256.

    Raises:
        ConfigError: there is no such distribution.
    """
    if not 1 <= mean <= longest:
        raise ConfigError(f"--mean {mean:g} must be from 1 to --max {longest}")
    normal = statistics.NormalDist()
    z = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])

    def lengths(mu: float) -> np.ndarray:
        return np.clip(np.exp(np.minimum(mu + z, 700)).round(), 1, longest).astype(int)

    low, high = -z.max() - 1, np.log(longest) - z.min() + 1  # all of length 1, all the longest
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if lengths(middle).mean() < mean else (low, middle)
    nearest = min((lengths(low), lengths(high)), key=lambda x: abs(x.mean() - mean))
    return np.random.default_rng(0).permutation(nearest).tolist()
