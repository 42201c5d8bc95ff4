"""Which sequences go through the model together; of their lengths alone, without tensors."""

from collections.abc import Sequence

import numpy as np


def plan_passes(lengths: Sequence[int], budget: int, *, packed: bool) -> list[list[int]]:
    """Which sequences share a forward/backward pass of at most ``budget`` positions.

    A sequence longer than the budget gets a pass of its own. The passes come largest first, so that
    memory that does not suffice shows at once.

    Args:
        lengths: of the sequences, rounded as they will be laid out.
        packed: a pass takes the sum of its sequences; else all of them are as long as the longest.

    Returns:
        Indices of the sequences by pass; every sequence is in one.
    """
    passes = _first_fit(lengths, budget) if packed else _by_length(lengths, budget)

    def size(indices: list[int]) -> int:
        taken = [lengths[i] for i in indices]
        return sum(taken) if packed else len(taken) * max(taken)

    return sorted((sorted(p) for p in passes), key=lambda indices: (-size(indices), indices))


def _first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Each sequence, longest first, into the first pass that has room for it."""
    passes: list[list[int]] = []
    left: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        where = next((p for p, room in enumerate(left) if lengths[i] <= room), None)
        if where is None:
            where = len(passes)
            passes.append([])
            left.append(budget)
        passes[where].append(i)
        left[where] -= lengths[i]
    return passes


def _by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Sequences of like length together: of all ways to cut the sorted lengths, the cheapest.

    A pass costs its positions, padding included, and an eighth of the budget for itself, so that
    long and short share one only where there is little of both.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    # Of the j shortest: the least cost, and how many of them make up the last pass.
    cost, rows = np.zeros(len(order) + 1), [0]
    counts = np.arange(1, len(order) + 1)
    for j, longest in enumerate((lengths[i] for i in order), start=1):
        fitting = min(j, max(1, budget // longest))
        choices = cost[j - fitting : j][::-1] + longest * counts[:fitting]
        rows.append(int(choices.argmin()) + 1)
        cost[j] = choices.min() + budget / 8
    passes, end = [], len(order)
    while end:
        passes.append(order[end - rows[end] : end])
        end -= rows[end]
    return passes


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
