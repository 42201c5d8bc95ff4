"""Deal the responses of a step to microbatches on data-parallel ranks.

The responses are shuffled into minibatches, one per optimizer update; each minibatch is dealt to
the data-parallel ranks, and each rank's share of it to microbatches. All of it follows from lengths
and a seed, so every rank computes the same without asking another.
"""

from collections.abc import Sequence
from itertools import cycle

import numpy as np


def shuffled(count: int, minibatches: int, seed: int, group: int = 1) -> list[list[int]]:
    """Return the responses of each minibatch, the same ones in every layout.

    Args:
        group: number of consecutive responses that stay in one minibatch.
    """
    import torch  # here, because plans are made on machines without it

    generator = torch.Generator().manual_seed(seed)
    groups = torch.randperm(count // group, generator=generator).tolist()
    order = [g * group + member for g in groups for member in range(group)]
    return _chunks(order, count // minibatches)


def deal(
    minibatches: Sequence[Sequence[int]],
    lengths: Sequence[int],
    ranks: int,
    micro_batch: int,
    *,
    budget: int = 0,
    packed: bool = False,
    in_step: bool = False,
) -> list[list[list[list[int]]]]:
    """Return indices of responses: ``[minibatch][data rank][microbatch][response]``.

    With a budget, data ranks may get different numbers of microbatches, unless they go ``in_step``.

    Args:
        lengths: of prompt and response, for each response, as they will be laid out.
        ranks: data-parallel ones.
        micro_batch: responses per forward/backward pass, where there is no budget.
        budget: positions per pass; 0: none. Passes are then ``plan_passes``'.
        packed: responses lie end to end.
        in_step: data ranks send each other tokens within a microbatch, to the experts they have.
    """

    def passes_of(share: Sequence[int]) -> list[list[int]]:
        if not budget:
            return _chunks(share, micro_batch)
        passes = plan_passes([lengths[i] for i in share], budget, packed=packed)
        return [[share[k] for k in together] for together in passes]

    dealt = []
    for minibatch in minibatches:
        shares = over_ranks(minibatch, lengths, ranks, evenly=budget > 0)
        by_rank = [passes_of(share) for share in shares]
        if in_step:
            count = max(map(len, by_rank))
            by_rank = [_halved_to(count, passes) for passes in by_rank]
        dealt.append(by_rank)
    return dealt


def _halved_to(count: int, passes: list[list[int]]) -> list[list[int]]:
    """Cut the passes with the most responses in two until there are ``count``."""
    passes = list(passes)
    while len(passes) < count:
        fullest = max(range(len(passes)), key=lambda i: len(passes[i]))
        half = len(passes[fullest]) // 2
        passes[fullest : fullest + 1] = [passes[fullest][:half], passes[fullest][half:]]
    return passes


def over_ranks(
    minibatch: Sequence[int], lengths: Sequence[int], ranks: int, *, evenly: bool
) -> list[list[int]]:
    """Return the responses of each data-parallel rank, equally many for all.

    Args:
        evenly: deal from the longest response down and turn around at each end, so that ranks get
            about equally much to compute.
    """
    if not evenly:
        return [list(minibatch[rank::ranks]) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    longest_first = sorted(minibatch, key=lambda i: -lengths[i])
    for i, share in zip(longest_first, cycle([*shares, *reversed(shares)]), strict=False):
        share.append(i)
    return shares


def plan_passes(lengths: Sequence[int], budget: int, *, packed: bool) -> list[list[int]]:
    """Plan which sequences share a forward/backward pass of at most ``budget`` positions.

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
        pass_lengths = [lengths[i] for i in indices]
        return sum(pass_lengths) if packed else len(pass_lengths) * max(pass_lengths)

    return sorted((sorted(p) for p in passes), key=lambda indices: (-size(indices), indices))


def _first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Put each sequence, longest first, into the first pass that has room for it."""
    passes: list[list[int]] = []
    room_left: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        pass_index = next((p for p, room in enumerate(room_left) if lengths[i] <= room), None)
        if pass_index is None:
            pass_index = len(passes)
            passes.append([])
            room_left.append(budget)
        passes[pass_index].append(i)
        room_left[pass_index] -= lengths[i]
    return passes


def _by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Group sequences of like length: of all ways to cut the sorted lengths, the cheapest.

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


def _chunks(items: Sequence[int], size: int) -> list[list[int]]:
    assert len(items) % size == 0, f"{len(items)} items do not divide into chunks of {size}"
    return [list(items[i : i + size]) for i in range(0, len(items), size)]
