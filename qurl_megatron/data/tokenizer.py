"""Text to token ids and back: the tokenizer in the model's own folder."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from qurl_megatron.errors import ConfigError

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class Tokenizer:
    """A Hugging Face tokenizer; transformers is imported when the first text comes."""

    def __init__(self, path: str | Path) -> None:
        """
        Raises:
            ConfigError: the folder holds no tokenizer.
        """
        self.path = Path(path)
        if not any((self.path / name).is_file() for name in FILES):
            raise ConfigError(
                f"model.path={self.path} holds no tokenizer (none of {', '.join(FILES)}); "
                "copy the files from the original checkpoint"
            )

    @cached_property
    def _wrapped(self) -> Any:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        # tokenizer.json says everything. For some families AutoTokenizer takes the family's own
        # splitting rules instead, wrong where the checkpoint was made with another tokenizer.
        complete = (self.path / "tokenizer.json").is_file()
        load = PreTrainedTokenizerFast if complete else AutoTokenizer
        try:
            return load.from_pretrained(self.path)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"the tokenizer in {self.path} cannot be loaded: {error}") from None

    def encode(self, text: str, *, chat: bool = False) -> tuple[int, ...]:
        """Ids of a prompt, with the special tokens that belong to its start.

        Args:
            chat: make the text one user turn in the model's chat template, open for the answer.
        """
        if not chat:
            return tuple(self._wrapped(text)["input_ids"])
        if not self._wrapped.chat_template:
            raise ConfigError(
                f"data.chat=true, but the tokenizer in {self.path} has no chat template; "
                "set data.chat=false or take an instruction-tuned checkpoint"
            )
        turn = self._wrapped.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        # The template writes the special tokens itself.
        return tuple(self._wrapped(turn, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        return self._wrapped.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
