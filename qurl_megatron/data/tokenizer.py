"""Text to token ids and back: the tokenizer in the model's own folder."""

import math
import traceback
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from qurl_megatron.data.rows import Question, Turn
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import read_config
from qurl_megatron.types import Sample

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them defines the tokens
BATCH = 1024  # prompts that are split at once
ENVIRONMENT = "> "  # before an environment's words, for a reader
MARK = "~what the policy said~"  # shows where the policy's turn ends in a template's output


class Tokenizer:
    """A Hugging Face tokenizer; transformers is imported when the first text comes."""

    def __init__(self, path: str | Path) -> None:
        """Raise ``ConfigError`` where the folder holds no tokenizer."""
        self.path = Path(path)
        if not any((self.path / name).is_file() for name in FILES):
            raise ConfigError(
                f"model.path={self.path} holds no {FILES[0]} (nor {' or '.join(FILES[1:])}), so "
                "prompts cannot be split into tokens; copy it from the original checkpoint, with "
                "tokenizer_config.json"
            )

    @cached_property
    def _wrapped(self) -> Any:
        import transformers

        # tokenizer.json says everything. For some families AutoTokenizer takes the family's own
        # splitting rules instead, wrong where the checkpoint was made with another tokenizer.
        # transformers imports a class when it is named, so only one of the two is named.
        load: Any
        if (self.path / "tokenizer.json").is_file():
            load = transformers.PreTrainedTokenizerFast
        else:
            load = transformers.AutoTokenizer
        try:
            return load.from_pretrained(self.path)
        except Exception as error:  # of any kind: damaged files lead the libraries anywhere
            reason = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
            raise ConfigError(
                f"the tokenizer in {self.path} cannot be loaded ({reason}); copy its files from "
                "the original checkpoint"
            ) from None

    def stop_ids(self) -> set[int]:
        """Tokens at which an engine that reads the tokenizer ends a response."""
        ids = (self._wrapped.eos_token_id, self._wrapped.get_added_vocab().get("<|eom_id|>"))
        return {token for token in ids if token is not None}

    def read(self, questions: Sequence[Question], *, chat: bool) -> Iterator[tuple[int, ...]]:
        """Yield each question's prompt ids, with the special tokens that belong to its start.

        Args:
            chat: make texts one user turn; turns go through the model's chat template anyway.

        Raises:
            ConfigError: nothing of a prompt is in the vocabulary, or a token of it is none of the
                model's, or there is no template, or it refuses the turns; says in which line.
        """
        for start in range(0, len(questions), BATCH):
            part = questions[start : start + BATCH]
            for plain, group in groupby(part, key=lambda question: not (chat or question.turns)):
                together = list(group)
                texts = [self._rendered(question, chat) for question in together]
                encoded = self._wrapped(texts, add_special_tokens=plain)["input_ids"]
                for question, ids in zip(together, encoded, strict=True):
                    self._check(question, ids)
                    yield tuple(ids)

    def _check(self, question: Question, ids: Sequence[int]) -> None:
        """Raise ``ConfigError`` if the ids are no prompt for the model of the folder."""
        place = question.place or "a question"
        if not ids:
            raise ConfigError(
                f"{place}: the tokenizer in {self.path} has no token for any part of the prompt "
                f"{question.text!r:.80}; take the questions that the model was made for, or "
                "another model"
            )
        if max(ids) >= self._model_vocabulary:
            raise ConfigError(
                f"{place}: the tokenizer in {self.path} gives the prompt {question.text!r:.40} the "
                f"token {max(ids)}, and the model has {self._model_vocabulary} tokens (vocab_size "
                "in its config.json): it is another model's, so copy tokenizer.json and "
                "tokenizer_config.json from the original checkpoint"
            )

    @cached_property
    def _model_vocabulary(self) -> float:
        """Number of tokens that the model of the folder knows."""
        if not (self.path / "config.json").is_file():
            return math.inf  # a tokenizer alone, for engines that run
        size = read_config(self.path).get("vocab_size")
        return size if isinstance(size, int) else math.inf

    def _rendered(self, question: Question, chat: bool) -> str:
        """Return the text to split into tokens; a template's text has its special tokens."""
        if not (chat or question.turns):
            return question.text
        place = f"{question.place}: " if question.turns and question.place else ""
        if not self._wrapped.chat_template:
            need, fix = "data.chat=true", "set data.chat=false"
            if question.turns:
                need, fix = "the prompt is a list of turns", "write it as text"
            raise ConfigError(
                f"{place}{need}, but the tokenizer in {self.path} has no chat template; {fix} or "
                "take an instruction-tuned checkpoint"
            )
        turns = list(question.turns) or [{"role": "user", "content": question.text}]
        try:
            return self._wrapped.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # of any kind: a template is a program of the model's maker
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
            line = getattr(error, "lineno", lines[-1] if lines else None)
            file = self.path / "chat_template.jinja"
            if not file.is_file():
                file = self.path / "tokenizer_config.json"
            raise ConfigError(
                f"{place}the chat template in {file}, line {line}, refuses the prompt's "
                f"turns ({error}); write other turns, or copy it from the original checkpoint"
            ) from None

    def following(self, message: Turn, *, chat: bool, last: int | None) -> tuple[int, ...]:
        """Return the ids of a message after the policy's turn, up to where its next turn begins.

        Append them to the policy's own ids, which are never made again from their text.

        Args:
            message: ``role`` and ``content``.
            chat: by the model's chat template; else as plain text.
            last: id that the policy ended its turn with, if it wrote any. If the template ends a
                turn with the same id, that is left out.

        Raises:
            ConfigError: the template refuses such a message.
        """
        if not chat:
            return tuple(self._wrapped(message["content"], add_special_tokens=False)["input_ids"])
        turns = ({"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}, message)
        try:
            text = self._rendered(Question("", "", turns=turns), chat)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; this was a message of the environment with role {message['role']!r}: "
                "have rollout.environment answer with another role, such as user"
            ) from None
        _, marker, after_marker = text.partition(MARK)
        if not marker:
            other = "user" if message["role"] != "user" else "tool"
            raise ConfigError(
                f"the chat template in {self.path} drops what the policy said once a message of "
                f"role {message['role']!r} follows; have rollout.environment answer with another "
                f"role, such as {other}, or take a template that keeps all turns"
            )
        ids = tuple(self._wrapped(after_marker, add_special_tokens=False)["input_ids"])
        return ids[1:] if ids[:1] == (last,) else ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a response, without special tokens."""
        return self._wrapped.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def texts_of(self, sample: Sample) -> tuple[str, str]:
        """Return the text of a response, and the policy's own turns of it, one per line.

        In the first, lines of an environment begin with ``ENVIRONMENT``.
        """
        if sample.written.all():
            response_text = self.decode(sample.response_ids.tolist())
            return response_text, response_text
        lines = []
        pairs = zip(sample.response_ids.tolist(), sample.written.tolist(), strict=True)
        for written, part in groupby(pairs, key=itemgetter(1)):
            text = self.decode([id for id, _ in part])
            lines.append(text if written else f"{ENVIRONMENT}{text.strip()}")
        return "\n".join(lines), "\n".join(self.decode(turn.tolist()) for turn in sample.turns)
