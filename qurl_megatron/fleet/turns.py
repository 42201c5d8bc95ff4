"""A response in the making: parts from engines, and turns of an environment between them.

The policy's tokens stay as they were sampled: their text is never tokenized again. An environment's
message is tokenized and appended, and the policy's next turn is another request that continues the
whole.
"""

import asyncio
import hashlib
from dataclasses import dataclass, field

import numpy as np

from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.fleet.answer import Part
from qurl_megatron.fleet.client import EngineError
from qurl_megatron.kit.errors import Unscored, unscored
from qurl_megatron.rewards.workers import EnvironmentPool
from qurl_megatron.types import FinishReason, Prompt, Sample

ATTEMPTS = 3  # without a new token, after which a request counts as impossible


@dataclass
class Turns:
    """An environment, and how its messages are tokenized."""

    pool: EnvironmentPool
    tokenizer: Tokenizer
    chat: bool  # a prompt that is text is a user turn of the chat template


@dataclass(eq=False)
class Response:
    """The parts of one sample so far, and how it goes on."""

    prompt: Prompt
    params: dict
    parts: list[Part] = field(default_factory=list)  # of engines, and of the environment
    finish: FinishReason | None = None
    failures: list[str] = field(default_factory=list)  # since the last new token
    turn: list[Part] = field(default_factory=list)  # parts of the policy's current turn
    turns: int = 1  # of the policy, the current one included
    messages: list[dict] = field(default_factory=list)  # of the turns before the current one
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

    def take(self, part: Part, *, max_turns: int) -> None:
        """Append an engine's answer.

        Args:
            max_turns: turns that the conversation may have.
        """
        self.parts.append(part)
        self.turn.append(part)
        if part.finish == "stop" and self.turns < max_turns:
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
        """Have the environment reply to a turn; begin the next one, or finish.

        Raises:
            ConfigError: the environment cannot be used, or its message has no place in the chat
                template.
            RuntimeError: no worker can be started, or the run ends.
        """
        turn: list[int] = []  # ids of the policy's tokens
        for part in self.turn:
            turn += part.ids.tolist()
        prompt, tokenizer = self.prompt, turns.tokenizer
        response = tokenizer.decode(turn)
        conversation = [*prompt.messages, *self.messages]
        reply = await asyncio.wrap_future(
            turns.pool.ask(conversation, response, prompt.answer, prompt.metadata)
        )
        self.ended = False
        if reply is None or isinstance(reply, Unscored):  # None: it was the last turn
            self.finish, self.failure = "stop", reply
            return
        chat, last = turns.chat or bool(prompt.turns), turn[-1] if turn else None
        ids = tokenizer.following(reply, chat=chat, last=last)
        if not ids:
            self.finish = "stop"
            self.failure = unscored(
                "invalid",
                f"the tokenizer in {tokenizer.path} has no token for any part of its message "
                f"{reply['content']!r:.80}",
            )
        elif len(ids) >= self.budget:  # not one token would be left to answer with
            self.finish, self.left_out = "length", True
        else:
            self.messages += ({"role": "assistant", "content": response}, reply)
            log_probs = np.zeros(len(ids), np.float32)
            # No versions: no weights have written these tokens.
            self.parts.append(Part(np.array(ids, np.int32), log_probs, (), "stop"))
            self.turn = []
            self.turns += 1

    def failed(self, reason: str) -> None:
        """Count a failure; raise ``EngineError`` after ``ATTEMPTS``: the request is at fault."""
        self.failures.append(reason)
        if len(self.failures) >= ATTEMPTS:
            reasons = "; ".join(dict.fromkeys(self.failures))
            raise EngineError(
                f"prompt {self.prompt.index} failed {ATTEMPTS} times without a token: {reasons}"
            )

    def routes(self) -> np.ndarray | None:
        """Return ``Sample.routes``: each token's experts when an engine first computed it.

        Tokens sampled by a request without recorded experts have none. A later request names some
        for them too, but other weights may have chosen those.
        """
        routes: np.ndarray | None = None
        unrecorded, end = [], len(self.prompt.input_ids)
        for part in self.parts:
            end += len(part.ids)
            covered = 0 if routes is None else len(routes)
            if part.routes is not None:
                new = part.routes[covered:]
                routes = new.copy() if routes is None else np.concatenate([routes, new])
            elif part.versions:
                unrecorded.append(slice(covered, end - 1))
        if routes is not None:
            for rows in unrecorded:
                routes[rows] = 0
        return routes

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
            routes=self.routes(),
            failure=self.failure,
            left_out=self.left_out,
        )


def hash63(text: str) -> int:
    """Return the first 63 bits of the text's BLAKE2b."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
