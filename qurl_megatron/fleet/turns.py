"""A conversation between the policy and an environment, token by token.

What the policy wrote stays as it was sampled: its ids are never made again from their text. What
the environment says is turned into ids, and those are appended. The next turn of the policy is one
more request for what follows on all of it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.kit.errors import Unscored, unscored
from qurl_megatron.observe.samples import say
from qurl_megatron.rewards.environment import EnvironmentPool, Message
from qurl_megatron.types import Prompt


@dataclass(frozen=True)
class Said:
    """What the environment said after a turn of the policy."""

    messages: tuple[Message, ...]  # the policy's, then the environment's
    ids: tuple[int, ...]  # of the latter


@dataclass
class Turns:
    """What conversations need: who answers, and how text becomes ids."""

    pool: EnvironmentPool
    tokenizer: Tokenizer
    chat: bool  # prompts that are text are user turns of the chat template
    unread: int = 0  # messages with text that the tokenizer has no token for, so far

    @property
    def most(self) -> int:
        """Turns of the policy in a conversation."""
        return self.pool.config.max_turns

    async def after(
        self, prompt: Prompt, earlier: Sequence[Message], turn: Sequence[int]
    ) -> Said | Unscored | None:
        """What the environment says to a turn of the policy; None where that was the last one.

        Args:
            earlier: messages after the prompt and before this turn.
            turn: ids of what the policy wrote now.

        Raises:
            ConfigError: the environment cannot be used, or its message has no place in the chat
                template.
            RuntimeError: no worker can be started, or the run ends.
        """
        response = self.tokenizer.decode(turn)
        reply = await asyncio.wrap_future(
            self.pool.ask([*prompt.messages, *earlier], response, prompt.answer, prompt.metadata)
        )
        if reply is None or isinstance(reply, Unscored):
            return reply
        chat = self.chat or bool(prompt.turns)
        ids = self.tokenizer.following(reply, chat=chat, last=turn[-1] if turn else None)
        if not ids:
            return unscored(
                "invalid",
                f"the tokenizer in {self.tokenizer.path} has no token for any part of its message "
                f"{reply['content']!r:.80}",
            )
        if word := self.tokenizer.unread(reply["content"]):
            self.unread += 1
            if self.unread == 1:
                say(
                    "rollout.environment says text that the tokenizer has no token for, which the "
                    f"model cannot see: first {word[:20]!r} in {reply['content'][:40]!r}"
                )
        return Said(({"role": "assistant", "content": response}, reply), ids)
