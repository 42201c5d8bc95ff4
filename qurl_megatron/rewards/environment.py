"""An environment of the user's answers many conversations at once, each call in a worker.

An answer comes from code that nobody has seen before. It goes through ``as_reply``, in the worker
and again where the pool reads it.
"""

import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from qurl_megatron.config import RolloutConfig
from qurl_megatron.kit.errors import CAUSES, ConfigError, Unscored, unscored
from qurl_megatron.rewards.item import finite
from qurl_megatron.rewards.line_pool import LinePool

FIELDS = ("messages", "response", "answer", "metadata")
ROLES = ("tool", "user")

Message = dict[str, Any]
"""``role`` and ``content``."""

Reply = Message | None | Unscored
"""The next message; None where the conversation is over; Unscored where the environment failed."""


class EnvironmentPool(LinePool):
    """Use as a context manager; leaving it ends the workers."""

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        task = {"environment": config.environment, "memory_gb": config.environment_memory_gb}
        super().__init__(
            "qurl_megatron.rewards.worker",
            task,
            config.environment_workers,
            called="a worker of the environment",
            limit_key="rollout.turn_timeout_s",
        )

    def ask(
        self, messages: Sequence[Message], response: str, answer: str, metadata: dict[str, Any]
    ) -> "Future[Reply]":
        """Ask for the environment's reply to a response, from any thread.

        The future raises ConfigError where the environment cannot be used any more, and
        RuntimeError where no worker can be started or the pool is being left.

        Args:
            messages: the conversation before the response.
            answer: the reference answer of the question.
        """
        values = (list(messages), response, answer, metadata)
        fields = dict(zip(FIELDS, values, strict=True))
        line = json.dumps(finite(fields), default=str)
        return self.put(line, self.config.turn_timeout_s, _reply)


def check_environment(config: RolloutConfig) -> None:
    """Start and end a worker of the recipe's environment, which imports it.

    Raises:
        ConfigError: it cannot be used.
    """
    if not config.environment:
        return
    with EnvironmentPool(replace(config, environment_workers=1)) as pool:
        try:
            pool.await_start()
        except RuntimeError as error:
            raise ConfigError(f"rollout.environment={config.environment}: {error}") from None


def as_reply(value: object) -> Reply:
    """Return an environment's value as a reply; Unscored where it is none."""
    if value is None:
        return None
    if not isinstance(value, dict):
        wrong = f"a value of type {type(value).__name__}"
    elif value.get("role") not in ROLES:
        wrong = f"a message with role {value.get('role')!r}"
    elif not isinstance(value.get("content"), str):
        wrong = f"a message whose content is of type {type(value.get('content')).__name__}"
    elif not value["content"].strip():
        wrong = "a message without text"  # after which the policy would talk to itself
    else:
        # Halves of a surrogate pair are text to Python, and to no tokenizer.
        content = value["content"].encode(errors="replace").decode()
        return {"role": value["role"], "content": content}
    return unscored(
        "invalid", f'{wrong}; return {{"role": "tool" or "user", "content": text}}, or None'
    )


def _reply(answer: Any) -> Reply:
    """
    Raises:
        ValueError: no worker says this.
    """
    match answer:
        case {"reply": reply}:
            return as_reply(reply)
        case {"failed": {"cause": str(cause), "why": str(why)}} if cause in CAUSES:
            return unscored(cause, why)
    raise ValueError(f"{answer!r:.80} is no reply")
