"""Prompts in an endless, reproducible order that a checkpoint can point into.

The order follows from the questions, the seed and the epoch alone, so a few small values are all
the state there is.
"""

import hashlib
import random
from functools import cached_property
from typing import Any

from qurl_megatron.config import DataConfig
from qurl_megatron.data.questions import data_files, held_out_questions, training_questions
from qurl_megatron.data.rows import Question
from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.types import Prompt


class PromptStream:
    """Training prompts, reshuffled every epoch, and held-out ones; too long ones are left out."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        seed: int,
        held_out: int = 0,
        answers: bool = True,
    ) -> None:
        """
        Args:
            held_out: how many prompts are wanted that are never trained on.
            answers: every row of a file must have one.

        Raises:
            ConfigError: a file or the task cannot be used, or all its prompts are too long.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.seed = seed
        self.files = data_files(config, held_out=bool(held_out), answers=answers)
        self.questions, eval_questions = self._questions(held_out)
        self._lengths = [len(ids) for ids in tokenizer.read(self.questions, chat=config.chat)]
        limit = config.max_prompt_tokens
        self.too_long = {i for i, n in enumerate(self._lengths) if n > limit}
        self.held_out: list[Prompt] = []
        eval_ids = tokenizer.read(eval_questions, chat=config.chat)
        for index, (question, ids) in enumerate(zip(eval_questions, eval_ids, strict=True)):
            if len(ids) <= limit:
                self.held_out.append(_prompt(question, index, ids))
        self.held_out_too_long = len(eval_questions) - len(self.held_out)
        if len(self.too_long) == len(self.questions):
            raise self._all_too_long("training")
        if eval_questions and not self.held_out:
            raise self._all_too_long("held-out")
        self.epoch = 0
        self.position = 0  # in the order of this epoch
        self.next_index = 0
        self._order = self._shuffled()

    def next_batch(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts; ``Prompt.index`` counts on over batches and epochs."""
        batch: list[Prompt] = []
        while len(batch) < count:
            if self.position == len(self._order):
                self.epoch += 1
                self.position = 0
                self._order = self._shuffled()
            number = self._order[self.position]
            self.position += 1
            if number in self.too_long:
                continue
            question = self.questions[number]
            # Ids of all prompts would take more memory than their texts.
            [ids] = self.tokenizer.read([question], chat=self.config.chat)
            batch.append(_prompt(question, self.next_index, ids))
            self.next_index += 1
        return batch

    def remarks(self) -> list[str]:
        """Return remarks on the data for a person to read before the run, a sentence each."""
        sentences = [file.summary for file in self.files.values()]
        limit = f"longer than data.max_prompt_tokens={self.config.max_prompt_tokens}"
        if self.too_long:
            sentences.append(
                f"{len(self.too_long)} of {len(self.questions)} training prompts are {limit} and "
                f"left out; the longest has {max(self._lengths)} tokens"
            )
        if self.held_out_too_long:
            total = self.held_out_too_long + len(self.held_out)
            sentences.append(
                f"{self.held_out_too_long} of {total} held-out prompts are {limit} and left out: "
                "held-out accuracy is that of the others"
            )
        return sentences

    def refuse_longer(self, limit: int) -> None:
        """Refuse prompts within data.max_prompt_tokens that are too long for the model.

        Args:
            limit: tokens of a prompt that leave room for its response.

        Raises:
            ConfigError: one is longer, and is not left out either.
        """
        texts = [question.text for question in self.questions]
        lengths = list(zip(texts, self._lengths, strict=True))
        lengths += [(prompt.text, len(prompt.input_ids)) for prompt in self.held_out]
        for text, tokens in lengths:
            if limit < tokens <= self.config.max_prompt_tokens:
                raise ConfigError(
                    f"prompt {text[:40]!r} has {tokens} tokens, and the model has room for {limit} "
                    f"beside a response of rollout.max_new_tokens; set "
                    f"data.max_prompt_tokens={limit} to leave such prompts out, or lower "
                    "rollout.max_new_tokens"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the stream; JSON can hold it."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "next_index": self.next_index,
            "fingerprint": self.fingerprint,
            "files": {key: file.checksum for key, file in self.files.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state_dict`` was called.

        Raises:
            ConfigError: that was on other prompts, or in another order.
        """
        if not state.keys() >= self.state_dict().keys():
            raise ConfigError(
                f"the checkpoint does not say where the prompts go on ({state!r:.80}); start "
                "from scratch in another train.run_dir"
            )
        for key, file in self.files.items():
            if state["files"].get(key, file.checksum) != file.checksum:
                raise ConfigError(
                    f"{file.name} has changed since the checkpoint was made; restore the file, "
                    "start from scratch in another train.run_dir, or go on in another with --fork"
                )
        if state["fingerprint"] != self.fingerprint:
            raise ConfigError(
                "the checkpoint was made with other prompts: the data section, the file or "
                "train.seed has changed since; restore it, or start from scratch in another "
                "train.run_dir"
            )
        self.epoch = state["epoch"]
        self.position = state["position"]
        self.next_index = state["next_index"]
        self._order = self._shuffled()

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides which prompt comes when."""
        config = self.config
        digest = hashlib.sha256()
        for part in (self.seed, config.shuffle, config.chat, config.max_prompt_tokens):
            digest.update(repr(part).encode())
        for question in self.questions:
            digest.update(repr((question.text, question.answer, *question.turns)).encode())
        return digest.hexdigest()[:16]

    def _shuffled(self) -> list[int]:
        order = list(range(len(self.questions)))
        if self.config.shuffle:
            random.Random(f"{self.seed}/{self.epoch}").shuffle(order)
        return order

    def _questions(self, held_out: int) -> tuple[list[Question], list[Question]]:
        """Return training questions, and up to ``held_out`` held-out ones."""
        if not self.files:
            return training_questions(self.config), held_out_questions(self.config, held_out)
        training, *held_out_lists = (file.questions for file in self.files.values())
        return training, [question for part in held_out_lists for question in part[:held_out]]

    def _all_too_long(self, kind: str) -> ConfigError:
        return ConfigError(
            f"every {kind} prompt is longer than data.max_prompt_tokens="
            f"{self.config.max_prompt_tokens} tokens; raise it"
        )


def _prompt(question: Question, index: int, ids: tuple[int, ...]) -> Prompt:
    return Prompt(index, ids, question.text, question.answer, question.metadata, question.turns)
