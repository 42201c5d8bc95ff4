"""One node's part in a run: it does what the head wants, and tells how it goes."""

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path

from qurl_megatron.errors import ConfigError
from qurl_megatron.runtime.files import CACHED_S
from qurl_megatron.torchrun.agent import Torchrun
from qurl_megatron.torchrun.board import Row, Word


class Member:
    """This node. The head is one, too."""

    def __init__(self, node: str, row: Row, per_node: int) -> None:
        self.node, self.row, self._per_node = node, row, per_node
        self._torchrun: Torchrun | None = None
        self._told = 0  # of the head's signals
        self._missed: float | None = None  # since when an attempt's folder is not seen

    def follow(self, word: Word, received: str = "") -> Row:
        """Bring this node to where the head wants it.

        Args:
            received: the newest signal that somebody has sent to this script.

        Raises:
            ConfigError: the run's folder is not shared, or cannot be written here.
        """
        self.row = replace(self.row, received=received)
        order = word.order
        current = order is not None and order.number == self.row.attempt and not word.over
        if not current:
            self.end()
        wanted = order is not None and self.node in order.seats and not word.over
        if wanted and order.number > self.row.attempt and self._sees(Path(order.logs)):
            self._torchrun = Torchrun(order, order.seats[self.node], self._per_node)
            self._told = 0
            self.row = replace(self.row, attempt=order.number, ended=None, failed={}, said="")
        if self._torchrun is not None:
            for number in word.signals[self._told :]:
                self._told += self._torchrun.signal(number)
            if (code := self._torchrun.code()) is not None:
                failed = self._torchrun.failed()
                self._note(code, failed, "" if failed else self._torchrun.last_words())
                self._torchrun.bury()
                self._torchrun = None
        return self.row

    def end(self) -> None:
        """Kill what of an attempt is left here."""
        if self._torchrun is not None:
            self._torchrun.end()
            self._note(self._torchrun.code(), {})
            self._torchrun = None

    def _sees(self, logs: Path) -> bool:
        """This node sees the attempt's folder. It does not wait, for then it would be silent."""
        if logs.is_dir():
            self._missed = None
            return True
        self._missed = self._missed or time.monotonic()
        if time.monotonic() - self._missed > CACHED_S:
            raise ConfigError(
                f"{logs} is not visible on {self.row.name} after {CACHED_S:g} s, although the head "
                "has made it; set train.run_dir to a folder that all nodes share"
            )
        with contextlib.suppress(FileNotFoundError):
            os.listdir(logs.parent)  # which queries the file server again
        return False

    def _note(self, code: int, failed: dict[str, int], said: str = "") -> None:
        self.row = replace(self.row, ended=code, failed=failed, said=said if code else "")
