"""A reward over HTTP: a verifier, or a model that judges. The worker's side of the conversation.

    POST URL   {"items": [{"prompt": "...", "response": "...", "answer": "...", "metadata": {}}]}
    200        {"scores": [1.0]}

One score per item, in their order; null for one that has none. A request is repeated where the
fault may pass by itself: no connection, no answer in time, and the answers in ``PASSING``. All else
is the last word.
"""

import asyncio
import json
import os
import ssl
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from qurl_megatron.config import RewardConfig
from qurl_megatron.kit import event_loop
from qurl_megatron.kit.errors import ConfigError, keep_secret, unscored
from qurl_megatron.rewards.item import Item, Score, as_score

PASSING = {408, 425, 429, 500, 502, 503, 504}
ANSWER_BYTES = 1 << 22
LONGEST_PAUSE_S = 30.0


def server_key(key: str, config: RewardConfig, env: Mapping[str, str] = os.environ) -> str | None:
    """Return the key that requests bring, where the recipe names one.

    Args:
        key: of this reward in the recipe, for messages.

    Raises:
        ConfigError: the environment has none, or one that no header can carry; it is not shown.
    """
    if not config.key_env:
        return None
    value = env.get(config.key_env, "")
    if not (value.isascii() and value.isprintable() and value.strip() == value != ""):
        wrong = "has characters no key has" if value.strip() else "is not set, or empty"
        raise ConfigError(
            f"{key}.key_env={config.key_env}: this environment variable {wrong}; set it to the key "
            f"of {key}.url"
        )
    return value


class Passing(Exception):
    """The server may answer the same request later."""


class Refused(Exception):
    """The server will not answer, or its answer is no list of scores."""


class Judge:
    """Scores by one server."""

    def __init__(self, key: str, config: RewardConfig) -> None:
        self.config = config
        self.name = config.url
        key_sent = f"not that in {config.key_env}" if config.key_env else "got none"
        self._unauthorized = f": it wants a key, and {key_sent} ({key}.key_env)"
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if token := server_key(key, config):
            keep_secret(token)
            headers["Authorization"] = f"Bearer {token}"
        secure = urlsplit(config.url).scheme == "https"
        self._options: dict[str, Any] = {
            "headers": headers,
            "timeout": None,  # a whole request has one
            # A proxy for the internet must not get requests to a server in the cluster.
            "trust_env": secure,
            "verify": ssl.create_default_context() if secure else False,
        }

    def __call__(self, items: Sequence[Item]) -> list[Score]:
        try:
            return event_loop.run(self._asked(items))
        except (Passing, Refused) as error:
            cause = "refused" if isinstance(error, Refused) else "unanswered"
            return [unscored(cause, f"{self.name} {error}")] * len(items)

    async def _asked(self, items: Sequence[Item]) -> list[Score]:
        body = json.dumps({"items": [item.given for item in items]}).encode()
        async with httpx.AsyncClient(**self._options) as http:
            for attempt in range(self.config.url_retries):
                try:
                    return _scores(await self._answer(http, body), len(items))
                except Passing:
                    await asyncio.sleep(min(2.0**attempt, LONGEST_PAUSE_S))
            return _scores(await self._answer(http, body), len(items))

    async def _answer(self, http: httpx.AsyncClient, body: bytes) -> bytes:
        """Return the body of an answer, whole within ``timeout_s`` with connection and headers."""
        limit, received = self.config.timeout_s, bytearray()
        try:
            async with (
                asyncio.timeout(limit),
                http.stream("POST", self.config.url, content=body) as response,
            ):
                if response.status_code != 200:
                    kind = Passing if response.status_code in PASSING else Refused
                    wrong = self._unauthorized if response.status_code in (401, 403) else ""
                    raise kind(f"answered {response.status_code}{wrong}")
                async for chunk in response.aiter_raw():
                    received += chunk
                    if len(received) > ANSWER_BYTES:
                        raise Refused(f"answered with more than {ANSWER_BYTES} bytes")
        except TimeoutError:
            raise Passing(f"did not answer within {limit:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Passing(f"did not answer: {error or type(error).__name__}") from None
        return bytes(received)


def _scores(content: bytes, count: int) -> list[Score]:
    """
    Raises:
        Refused: the answer does not hold that many values.
    """
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refused(f"answered with something that is not JSON: {error}") from None
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list) or len(scores) != count:
        scores_found = f"{len(scores)} scores" if isinstance(scores, list) else "no list of scores"
        raise Refused(f"answered with {scores_found} for {count} responses")
    return [as_score(value) for value in scores]
