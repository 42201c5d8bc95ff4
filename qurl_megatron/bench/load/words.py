"""Prompts that are the same as text and as token ids, for load generators that send text alone.

Few sequences of ids survive their way through text: neighbours merge into other tokens. Those of
tokens that are a whole word each do, so prompts are made of such words alone.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models

from qurl_megatron.engines.embedded.text_codec import FILE, TextCodec
from qurl_megatron.errors import ConfigError
from qurl_megatron.weights.source import write_json

MOST = 4096  # words are enough
FEWEST = 32  # make prompts that differ


class Words:
    """Of the tokenizer in a model's folder."""

    def __init__(self, folder: Path, vocab: int) -> None:
        """
        Args:
            vocab: of the model; its tokenizer may have fewer.

        Raises:
            ConfigError: there is no tokenizer, or it has too few words.
        """
        codec = TextCodec.of(folder)
        if codec is None:
            raise ConfigError(
                f"--guidellm sends text, and {folder} has no {FILE}; give --model the whole "
                "folder that the engine serves, or a shape where it is started here"
            )
        self._codec, self._vocab = codec, vocab
        if len(self.ids) < FEWEST:
            raise ConfigError(
                f"--guidellm sends text, and {folder}/{FILE} has only {len(self.ids)} tokens that "
                f"are a word each; prompts need {FEWEST}"
            )

    @cached_property
    def ids(self) -> list[int]:
        """Of words, at most ``MOST``."""
        return list(islice(self._found(), MOST))

    def _found(self) -> Iterator[int]:
        for token in range(self._vocab):
            # Two of them, to see that a space parts it from its neighbour.
            text = self._codec.decode([token, token])
            parts = text.split()
            apart = len(parts) == 2 and parts[0] == parts[1] and parts[0].isalnum()
            if apart and self._codec.encode(text) == [token, token]:
                yield token

    def text(self, ids: Sequence[int]) -> str:
        """
        Raises:
            ConfigError: the tokenizer reads it as other ids.
        """
        text = self._codec.decode(ids)
        if self._codec.encode(text) != list(ids):
            raise ConfigError(
                f"--guidellm sends text, and {self._codec.path} does not read the text that it "
                "writes as the same tokens again; give --model a shape"
            )
        return text


def write_tokenizer(folder: Path, vocab: int) -> None:
    """One for random weights: token 7 is the word "w7".

    Added tokens, which engines that know the family's tokenizer better than this file read alike;
    the blanks between them are not tokens.
    """
    words = [f"w{token}" for token in range(vocab)]
    tokenizer = Tokenizer(models.BPE({word: token for token, word in enumerate(words)}, []))
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    tokenizer.save(str(folder / FILE))
    # SGLang reads this one first. Special tokens of the family's would be more than the model has.
    none = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **none}
    write_json(folder / "tokenizer_config.json", settings)
