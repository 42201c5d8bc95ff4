"""One node's part in a run: it does what the head wants, and reports how it goes."""

import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from qurl_megatron.errors import ConfigError
from qurl_megatron.runtime.filesystem import CACHED_S
from qurl_megatron.torchrun.agent import Torchrun
from qurl_megatron.torchrun.board import NodeRow, Order, Word


class NodeMember:
    """This node. The head is one, too."""

    def __init__(self, node: str, row: NodeRow, per_node: int) -> None:
        self.node, self.row, self._per_node = node, row, per_node
        self._torchrun: Torchrun | None = None
        self._told = 0  # of the head's signals
        self._missed = 0, 0.0  # an attempt whose folder is not seen, and since when

    def follow(self, word: Word, received: str = "") -> NodeRow:
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
        if order and wanted and order.number > self.row.attempt and self._sees(order):
            self._torchrun = Torchrun(order, order.seats[self.node], self._per_node)
            self._told = 0
            self.row = replace(self.row, attempt=order.number, ended=None, failed={}, said="")
        if self._torchrun is not None:
            for number in word.signals[self._told :]:
                self._told += self._torchrun.signal(number)
            self._look()
        return self.row

    def end(self) -> None:
        """Kill what is left of an attempt here."""
        self._look()  # what failed before counts
        if self._torchrun is not None:
            self._torchrun.end()
            self.row = replace(self.row, ended=128 + signal.SIGKILL)
            self._torchrun = None

    @property
    def busy(self) -> bool:
        """Ranks of an attempt run here."""
        return self._torchrun is not None

    def _look(self) -> None:
        """Note how torchrun ended, once it has."""
        if self._torchrun is None or (code := self._torchrun.code()) is None:
            return
        failed = self._torchrun.failed()
        said = self._torchrun.last_words() if code and not failed else ""
        self.row = replace(self.row, ended=code, failed=failed, said=said)
        self._torchrun.bury()
        self._torchrun = None

    def _sees(self, order: Order) -> bool:
        """This node sees the attempt's folder. It does not wait, for then it would be silent."""
        logs = Path(order.logs)
        if logs.is_dir():
            return True
        if self._missed[0] != order.number:
            self._missed = order.number, time.monotonic()
        if time.monotonic() - self._missed[1] > CACHED_S:
            raise ConfigError(
                f"{logs} is not visible on {self.row.name} after {CACHED_S:g} s, although the head "
                "has made it; set train.run_dir to a folder that all nodes share"
            )
        with contextlib.suppress(FileNotFoundError):
            os.listdir(logs.parent)  # which queries the file server again
        return False
