"""Prompts in an endless, reproducible order that a checkpoint can point into.

The order follows from the questions, the seed and the epoch alone, so that a cursor of five small
values is all the state there is.
"""

import hashlib
import random
from functools import cached_property
from typing import Any

from qurl_megatron.config import DataConfig
from qurl_megatron.data.questions import Question, held_out_questions, training_questions
from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.errors import ConfigError
from qurl_megatron.types import Prompt


class PromptStream:
    """Training prompts, reshuffled every epoch; too long ones are passed over and counted."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, *, seed: int) -> None:
        """
        Raises:
            ConfigError: the file or task cannot be used.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.seed = seed
        self.questions = training_questions(config)
        self.epoch = 0
        self.position = 0  # in the order of this epoch
        self.next_index = 0
        self.dropped = 0  # prompts passed over so far, every epoch anew
        self._order = self._shuffled()

    def next_batch(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts; ``Prompt.index`` counts on over batches and epochs.

        Raises:
            ConfigError: no prompt of a whole epoch is short enough.
        """
        batch: list[Prompt] = []
        passed_over = 0
        while len(batch) < count:
            if self.position == len(self._order):
                self.epoch += 1
                self.position = 0
                self._order = self._shuffled()
            question = self.questions[self._order[self.position]]
            self.position += 1
            prompt = self._prompt(question, self.next_index)
            if prompt is not None:
                batch.append(prompt)
                self.next_index += 1
                passed_over = 0
                continue
            self.dropped += 1
            passed_over += 1
            if passed_over == len(self.questions):
                raise self._all_too_long()
        return batch

    def held_out(self, count: int) -> list[Prompt]:
        """Up to ``count`` prompts that are never trained on; the same ones at every call.

        Raises:
            ConfigError: there are none, or the task has too few questions.
        """
        questions = held_out_questions(self.config, count)
        prompts = [self._prompt(question, index) for index, question in enumerate(questions)]
        kept = [prompt for prompt in prompts if prompt is not None]
        if not kept:
            raise self._all_too_long()
        return kept

    def refuse_longer(self, limit: int, held_out: int = 0) -> None:
        """Look at all prompts, where data.max_prompt_tokens lets some pass that are too long.

        Args:
            limit: tokens of a prompt that leave room for its response.
            held_out: how many prompts an evaluation asks.

        Raises:
            ConfigError: one is longer, and is not dropped either.
        """
        if self.config.max_prompt_tokens <= limit:
            return
        asked = held_out_questions(self.config, held_out) if held_out else []
        for question in (*self.questions, *asked):
            prompt = self._prompt(question, 0)
            if prompt is not None and len(prompt.input_ids) > limit:
                raise ConfigError(
                    f"prompt {question.text[:40]!r} has {len(prompt.input_ids)} tokens, and the "
                    f"model has room for {limit} beside a response of rollout.max_new_tokens; set "
                    f"data.max_prompt_tokens={limit} to leave such prompts out, or lower "
                    "rollout.max_new_tokens"
                )

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands; JSON can hold it."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "next_index": self.next_index,
            "dropped": self.dropped,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state_dict`` was called.

        Raises:
            ConfigError: that was on other prompts, or in another order.
        """
        if state.keys() != self.state_dict().keys():
            raise ConfigError(
                f"the checkpoint does not say where the prompts go on ({state!r:.80}); start anew "
                "in another train.run_dir"
            )
        if state["fingerprint"] != self.fingerprint:
            raise ConfigError(
                "the checkpoint was made with other prompts: the data section, the file or "
                "train.seed has changed since; restore it, or start anew in another train.run_dir"
            )
        self.epoch = state["epoch"]
        self.position = state["position"]
        self.next_index = state["next_index"]
        self.dropped = state["dropped"]
        self._order = self._shuffled()

    @cached_property
    def fingerprint(self) -> str:
        """Changes with anything that changes which prompt comes when."""
        config = self.config
        digest = hashlib.sha256()
        for part in (self.seed, config.shuffle, config.chat, config.max_prompt_tokens):
            digest.update(repr(part).encode())
        for question in self.questions:
            digest.update(repr((question.text, question.answer)).encode())
        return digest.hexdigest()[:16]

    def _shuffled(self) -> list[int]:
        order = list(range(len(self.questions)))
        if self.config.shuffle:
            random.Random(f"{self.seed}/{self.epoch}").shuffle(order)
        return order

    def _prompt(self, question: Question, index: int) -> Prompt | None:
        """None where the prompt is too long."""
        ids = self.tokenizer.encode(question.text, chat=self.config.chat)
        if len(ids) > self.config.max_prompt_tokens:
            return None
        return Prompt(index, ids, question.text, question.answer)

    def _all_too_long(self) -> ConfigError:
        return ConfigError(
            "every prompt is longer than data.max_prompt_tokens="
            f"{self.config.max_prompt_tokens} tokens"
        )
