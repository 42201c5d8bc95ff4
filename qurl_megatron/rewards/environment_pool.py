"""The next message of many conversations at once, by workers that each answer one response at a
time: an environment is the user's code, and a model made up its input."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from qurl_megatron.config import RolloutConfig
from qurl_megatron.kit.errors import CAUSES, ConfigError, unscored
from qurl_megatron.rewards.line_pool import LinePool
from qurl_megatron.rewards.reply import Message, Reply, as_reply, request


class EnvironmentPool(LinePool):
    """Use as a context manager; leaving it ends the workers."""

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        super().__init__(
            "qurl_megatron.rewards.environment_worker",
            {"name": config.environment, "memory_gb": config.environment_memory_gb},
            config.environment_workers,
            called="a worker of the environment",
            limit_key="rollout.turn_timeout_s",
        )

    def ask(
        self, messages: Sequence[Message], response: str, answer: str, metadata: dict[str, Any]
    ) -> "Future[Reply]":
        """Return the environment's answer, as a future; any thread may ask.

        The future raises ConfigError where the environment cannot be used any more, and
        RuntimeError where no worker can be started or the pool is being left.
        """
        question = request(messages, response, answer, metadata)
        return self.put(question, self.config.turn_timeout_s, _reply)


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


def _reply(answer: Any) -> Reply:
    """Read the reply in a worker's answer.

    Raises:
        ValueError: that is nothing that workers say.
    """
    match answer:
        case {"reply": reply}:
            return as_reply(reply)
        case {"failed": {"cause": str(cause), "why": str(why)}} if cause in CAUSES:
            return unscored(cause, why)
    raise ValueError(f"{answer!r:.80} is no reply")
