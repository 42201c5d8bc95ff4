"""A response in the making: parts from engines, and turns of an environment between them.

The policy's tokens stay as they were sampled: their ids are never made again from their text. An
environment's message is turned into ids and appended; the policy's next turn is one more request
that continues all of it.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.fleet.answer import Part
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.kit.errors import Unscored, unscored
from qurl_megatron.rewards.workers import EnvironmentPool, Message
from qurl_megatron.types import FinishReason, Prompt, Sample

ATTEMPTS = 3  # without one new token, before a request is taken for impossible


@dataclass(frozen=True)
class Said:
    """An environment's reply to a turn of the policy."""

    messages: tuple[Message, ...]  # the policy's, then the environment's
    ids: tuple[int, ...]  # of the latter


@dataclass
class Turns:
    """An environment, and how its text becomes ids."""

    pool: EnvironmentPool
    tokenizer: Tokenizer
    chat: bool  # prompts that are text are user turns of the chat template

    @property
    def most(self) -> int:
        """Turns of the policy in a conversation."""
        return self.pool.config.max_turns

    async def after(
        self, prompt: Prompt, earlier: Sequence[Message], turn: Sequence[int]
    ) -> Said | Unscored | None:
        """Return the environment's reply to a turn; None where that was the last one.

        Args:
            earlier: messages after the prompt and before this turn.
            turn: ids that the policy wrote.

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
        return Said(({"role": "assistant", "content": response}, reply), ids)


@dataclass(eq=False)
class Response:
    """The parts of one sample so far, and how it goes on."""

    prompt: Prompt
    params: dict
    parts: list[Part] = field(default_factory=list)  # of engines, and of the environment
    finish: FinishReason | None = None
    failures: list[str] = field(default_factory=list)  # since the last new token
    turn: list[Part] = field(default_factory=list)  # parts of the policy's present turn
    turns: int = 1  # of the policy, this one included
    messages: list[dict] = field(default_factory=list)  # of the turns before it
    ended: bool = False  # the turn has ended, and the environment is to answer
    failure: Unscored | None = None  # of the environment
    left_out: bool = False  # the environment's last message had no room

    @property
    def received(self) -> int:
        return sum(len(part.ids) for part in self.parts)

    @property
    def budget(self) -> int:
        return self.params["max_new_tokens"] - self.received

    def request(self) -> tuple[list[int], dict]:
        """Return the input ids and sampling parameters of the next request."""
        params = {**self.params, "max_new_tokens": self.budget}
        if self.received and "sampling_seed" in params:
            # Engines draw by seed and position in the response: the same seed would draw the first
            # tokens' random numbers again.
            params["sampling_seed"] = hash63(f"{params['sampling_seed']}/{self.received}")
        ids = list(self.prompt.input_ids)
        for part in self.parts:
            ids += part.ids.tolist()
        return ids, params

    def take(self, part: Part, *, most: int) -> None:
        """Append an engine's answer.

        Args:
            most: turns that the conversation may have.
        """
        self.parts.append(part)
        self.turn.append(part)
        if part.finish == "stop" and self.turns < most:
            self.ended = True
        elif part.finish != "abort":
            self.finish = part.finish
        elif not self.budget:
            self.finish = "length"
        if len(part.ids):
            self.failures = []
        elif not (self.finish or self.ended):
            self.failed(f"it was aborted by the engine: {part.message}")

    async def converse(self, turns: Turns) -> None:
        """Begin the next turn, or finish.

        Raises:
            ConfigError, RuntimeError: as ``Turns.after``.
        """
        ids: list[int] = []
        for part in self.turn:
            ids += part.ids.tolist()
        reply = await turns.after(self.prompt, self.messages, ids)
        self.ended = False
        if reply is None or isinstance(reply, Unscored):
            self.finish, self.failure = "stop", reply
        elif len(reply.ids) >= self.budget:  # not one token would be left to answer with
            self.finish, self.left_out = "length", True
        else:
            self.messages += reply.messages
            count = len(reply.ids)  # tokens that no version of the weights has written
            log_probs = np.zeros(count, np.float32)
            self.parts.append(Part(np.array(reply.ids, np.int32), log_probs, (), "stop"))
            self.turn = []
            self.turns += 1

    def failed(self, reason: str) -> None:
        """
        Raises:
            EngineError: it has failed too often to be the engines' fault.
        """
        self.failures.append(reason)
        if len(self.failures) >= ATTEMPTS:
            reasons = "; ".join(dict.fromkeys(self.failures))
            raise EngineError(
                f"prompt {self.prompt.index} failed {ATTEMPTS} times without a token: {reasons}"
            )

    def sample(self) -> Sample:
        assert self.finish is not None, "it is finished"
        ids, log_probs, written = [], [], []
        versions: list[tuple[int, int]] = []
        for part in self.parts:
            ids.append(part.ids)
            log_probs.append(part.log_probs)
            versions += part.versions
            written.append(np.full(len(part.ids), bool(part.versions)))
        return Sample(
            prompt=self.prompt,
            response_ids=np.concatenate(ids),
            behaviour_log_probs=np.concatenate(log_probs),
            finish_reason=self.finish,
            versions=tuple(versions),
            written=np.concatenate(written),
            failure=self.failure,
            left_out=self.left_out,
        )


def hash63(text: str) -> int:
    """Return the first 63 bits of the text's BLAKE2b."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
