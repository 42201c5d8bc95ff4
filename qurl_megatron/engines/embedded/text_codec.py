"""Text to token ids and back, for clients that speak text; a trainer never does.

A token may be a part of a character: while a response is growing, its text ends before the first
character that is not whole. The last text of a response has everything, so what was sent on the
way is always its beginning.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

from qurl_megatron.errors import ConfigError

FILE = "tokenizer.json"
INCOMPLETE = "\ufffd"


class TextCodec:
    """The tokenizer in a model's folder."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ConfigError: the file is not a tokenizer.
        """
        self.path = path
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more special
            raise ConfigError(
                f"{path} is not a tokenizer ({error}); copy it from the original checkpoint, or "
                "serve with --skip-tokenizer-init"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """That of a model's folder, where it has one."""
        path = folder / FILE
        return cls(path) if path.is_file() else None

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that belong to its start."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special)


class GrowingText:
    """The text of a response that grows; each step costs as much as its new tokens do."""

    def __init__(self, codec: TextCodec, *, skip_special: bool) -> None:
        self._codec, self._skip_special = codec, skip_special
        self._told: list[str] = []
        self._window = 0  # decoding starts here: tokens before it no longer change what follows
        self._read = 0  # tokens whose text has been sent

    def grow(self, ids: Sequence[int], *, last: bool = False) -> str:
        """The whole text of ``ids``, which begin with those of the call before.

        Args:
            last: no more will come, so give an incomplete character too.
        """
        known = self._decode(ids[self._window : self._read])
        text = self._decode(ids[self._window :])
        if last or (len(text) > len(known) and not text.endswith(INCOMPLETE)):
            self._told.append(text[len(known) :])
            self._window, self._read = self._read, len(ids)
        return "".join(self._told)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._codec.decode(ids, skip_special=self._skip_special)
