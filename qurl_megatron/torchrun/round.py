"""One attempt as the head sees it: which nodes are in it, how they ended, and what that means.

Nothing here waits, or asks anybody.
"""

import signal
from collections.abc import Collection, Mapping, Sequence

from qurl_megatron.slurm.verdict import FINAL
from qurl_megatron.torchrun.board import SILENT_S, NodeRow, Order


class Round:
    """The rows of an attempt's nodes, as far as they have reported."""

    def __init__(self, order: Order, rows: Mapping[str, NodeRow]) -> None:
        """
        Args:
            rows: of the nodes when the attempt began.
        """
        self._number = order.number
        self._rows = {node: rows[node] for node in order.seats}
        self._lost: dict[str, str] = {}  # how, by node
        self._failed: dict[str, int] = {}  # by rank, in the order in which they were reported

    @property
    def names(self) -> list[str]:
        """Of the nodes, those that are lost included."""
        return [row.name for row in self._rows.values()]

    def hear(self, heard: Mapping[str, NodeRow]) -> list[str]:
        """Take in rows.

        Args:
            heard: those of the nodes that are not silent.

        Returns:
            What there is to say of it.
        """
        news = []
        for node, before in self._rows.items():
            row = heard.get(node)
            if row is None or row.left:
                if node not in self._lost and self._code(node) is None:
                    how = "which left" if row else f"silent for {SILENT_S:.0f} s"
                    self._lost[node] = f"lost {before.name}, {how}"
                    news.append(self._lost[node])
            elif row.attempt == self._number and row != before:
                self._rows[node] = row
                if before.attempt != self._number or before.ended is None:
                    news += how_it_failed(row)
                    self._failed |= row.failed
        return news

    @property
    def lost(self) -> str:
        """A sentence where nodes are lost, else ""."""
        return "; ".join(self._lost.values())

    @property
    def finished(self) -> bool:
        """Every node has ended its part, or is lost."""
        return all(n in self._lost or self._code(n) is not None for n in self._rows)

    @property
    def failing(self) -> bool:
        """What still runs will not end well."""
        return bool(self._lost) or any(self._code(node) for node in self._rows)

    @property
    def code(self) -> int:
        """The exit code of all of it: of a rank whose own says that another attempt would end
        likewise, else of one that was killed, else of the first that failed."""
        codes = [*self._failed.values(), *(self._code(node) or 0 for node in self._rows)]
        ranks = [*self._failed.values()]
        final = [code for code in ranks if code in FINAL]
        killed = [code for code in ranks if signal_of(code)]
        failed = [code for code in codes if code]
        return next(iter([*final, *killed, *failed]), int(bool(self._lost)))

    def _code(self, node: str) -> int | None:
        row = self._rows[node]
        return row.ended if row.attempt == self._number else None


def signal_of(code: int) -> int:
    """The signal that ended a process of this exit code; 0: none did."""
    return code - 128 if code - 128 in signal.valid_signals() else 0


def how_it_failed(row: NodeRow) -> list[str]:
    """Lines on the ranks of a node, in the words in which ``slurm.cause`` knows srun's."""
    lines = []
    for rank, code in row.failed.items():
        number = signal_of(code)
        how = signal.strsignal(number) if number else f"Exited with exit code {code}"
        lines.append(f"error: {row.name}: task {rank}: {how}")
    if row.said:
        lines.append(f"torchrun on {row.name} ended with {row.ended}: {row.said}")
    return lines


def seats(head: str, names: Mapping[str, str], nodes: int) -> dict[str, int]:
    """Who is which node: the head the first, for engines start there; the others by their names,
    so that they keep their places from attempt to attempt.

    Args:
        names: of all that are here, by id.
        nodes: how many are needed.
    """
    others = sorted((name, node) for node, name in names.items() if node != head)
    chosen = [head, *(node for _, node in others)][:nodes]
    return {node: seat for seat, node in enumerate(chosen)}


def missing(before: Sequence[str], here: Collection[str], nodes: int) -> str:
    """Which nodes have not come, in words.

    Args:
        before: names of those that took part in the attempt before; none: there was none.
    """
    left = list(before)
    for name in here:
        if name in left:
            left.remove(name)
    come = f"{len(here)} of {nodes} nodes are here ({', '.join(sorted(here))})"
    return f"{come}, {', '.join(sorted(left))} missing" if left else come
