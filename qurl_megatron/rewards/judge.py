"""A reward over HTTP: a verifier, or a model that judges.

    POST URL   {"items": [{"prompt": "...", "response": "...", "answer": "...", "metadata": {}}]}
    200        {"scores": [1.0]}

One score per item, in their order; null for one that has none. A request is repeated where the
fault may pass by itself: no connection, no answer in time, and the answers in ``PASSING``. All else
is the last word.
"""

import asyncio
import json
import math
import os
import ssl
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from qurl_megatron.config import RewardConfig
from qurl_megatron.kit import event_loop
from qurl_megatron.kit.errors import ConfigError, Unscored, keep_secret, unscored
from qurl_megatron.rewards.verifiers import Score, as_score
from qurl_megatron.rewards.workers import LOOK_S, Abandoned

PASSING = {408, 425, 429, 500, 502, 503, 504}
LONGEST_PAUSE_S = 30.0


class Judge:
    """Scores by one server."""

    def __init__(
        self, config: RewardConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raise ``ConfigError`` where the environment lacks the key that the recipe names."""
        self.config, self._clock = config, clock
        self._headers = {"Content-Type": "application/json"}
        if config.key_env:
            self._headers["Authorization"] = f"Bearer {_server_key(config.key_env)}"
        url, self._proxy = urlsplit(config.url), None
        self._tls: ssl.SSLContext | bool = False
        # A proxy for the internet must not get requests to a server in the cluster.
        if url.scheme == "https":
            self._tls = ssl.create_default_context()
            if not proxy_bypass(url.hostname or ""):
                self._proxy = getproxies().get("https")

    def answers(self, items: Sequence[str], stop: Callable[[], bool]) -> list[Score]:
        """Return the score of each item, which is JSON, in order.

        Raises:
            Abandoned: ``stop()`` became true.
        """
        return event_loop.run(self._answers(items, stop))

    async def _answers(self, items: Sequence[str], stop: Callable[[], bool]) -> list[Score]:
        config = self.config
        size = min(config.batch, math.ceil(len(items) / config.workers))
        batches = [items[start : start + size] for start in range(0, len(items), size)]
        reason = f"{config.url} within reward.url_deadline_s={config.url_deadline_s:g}"
        end = self._clock() + config.url_deadline_s
        slots = asyncio.Semaphore(config.workers)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, use_dns_cache=False, ssl=self._tls),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(),  # a whole request has one
            proxy=self._proxy,
        ) as http:
            tasks = [asyncio.create_task(self._scores(http, slots, batch)) for batch in batches]
            pending = set(tasks)
            try:
                while pending and self._clock() < end:
                    if stop():
                        raise Abandoned
                    _, pending = await asyncio.wait(pending, timeout=LOOK_S)
            finally:
                for task in pending:
                    task.cancel()
            scores: list[Score] = []
            for task, batch in zip(tasks, batches, strict=True):
                unanswered: list[Score] = [Unscored("unanswered", reason)] * len(batch)
                scores += unanswered if task in pending else task.result()
            return scores

    async def _scores(
        self, http: aiohttp.ClientSession, slots: asyncio.Semaphore, items: Sequence[str]
    ) -> list[Score]:
        """Return the scores of one request, repeated where that may help.

        Args:
            slots: one is taken for each request that is under way.
        """
        body, problem = f'{{"items": [{",".join(items)}]}}', ""
        for attempt in range(self.config.url_retries + 1):
            if attempt:
                await asyncio.sleep(min(2.0 ** (attempt - 1), LONGEST_PAUSE_S))
            try:
                async with (
                    slots,
                    asyncio.timeout(self.config.timeout_s),
                    http.post(self.config.url, data=body, allow_redirects=False) as response,
                ):
                    status, content = response.status, await response.read()
            except TimeoutError:
                problem = f"did not answer within {self.config.timeout_s:g} s"
                continue
            except aiohttp.ClientError as error:
                problem = f"did not answer: {str(error) or type(error).__name__}"
                continue
            if status == 200:
                return self._read(content, len(items))
            problem = f"answered {status}"
            if status in (401, 403):
                sent = f"not that in {self.config.key_env}" if self.config.key_env else "got none"
                problem += f": it wants a key, and {sent} (reward.key_env)"
            if status not in PASSING:
                return self._none("refused", problem, len(items))
        return self._none("unanswered", problem, len(items))

    def _read(self, content: bytes, count: int) -> list[Score]:
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError) as error:
            problem = f"answered with something that is not JSON: {error}"
            return self._none("refused", problem, count)
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if isinstance(scores, list) and len(scores) == count:
            return [as_score(value) for value in scores]
        scores_found = f"{len(scores)} scores" if isinstance(scores, list) else "no list of scores"
        return self._none("refused", f"answered with {scores_found} for {count} responses", count)

    def _none(self, cause: str, problem: str, count: int) -> list[Score]:
        return [unscored(cause, f"{self.config.url} {problem}")] * count


def _server_key(name: str) -> str:
    """Return the key in an environment variable, which is never shown.

    Raises:
        ConfigError: there is none, or one that no header can carry.
    """
    value = os.environ.get(name, "")
    if not (value.isascii() and value.isprintable() and value.strip() == value != ""):
        wrong = "has characters no key has" if value.strip() else "is not set, or empty"
        raise ConfigError(
            f"reward.key_env={name}: this environment variable {wrong}; set it to the key of "
            "reward.url"
        )
    keep_secret(value)
    return value
