"""Responses to one prompt as a tree, so that the model reads the prompt once; of lengths alone.

A tree's prefix is the prompt without its last token, and each response is a branch that goes on
from there. A branch begins with the prompt's last token, because it is there that a response's
first token is predicted, another one in each branch; it ends before the response's last token,
which predicts nothing. A response that has its prompt to itself is a branch without a prefix.

A family is a list of responses to the same prompt; each cut costs one more copy of the prefix.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from heapq import heapreplace
from typing import NamedTuple

from qurl_megatron.data.passes import plan_passes

Family = list[int]  # indices of responses
Positions = Callable[[Family], int]
"""Positions that a family takes."""

CUTS = 3  # that are tried for each hand


class Tree(NamedTuple):
    """Where one prompt and its responses lie in a row: the prefix, then branch after branch."""

    start: int
    prefix: int
    branches: tuple[int, ...]  # positions of each

    @property
    def stop(self) -> int:
        return self.start + self.prefix + sum(self.branches)

    @property
    def depth(self) -> int:
        """Positions from the first token to the end of the longest branch."""
        return self.prefix + max(self.branches)


def tree_of(prompt: int, responses: Sequence[int], start: int = 0) -> Tree:
    """The tree of a prompt of ``prompt`` tokens and of so many tokens in each response."""
    prefix = prompt - 1 if len(responses) > 1 else 0
    # An empty response has a position all the same: no row is to be empty.
    return Tree(start, prefix, tuple(max(1, prompt + n - 1 - prefix) for n in responses))


def families(indices: Sequence[int], prompts: Sequence[int]) -> list[Family]:
    """The responses by prompt, in the order in which the prompts first come.

    Args:
        prompts: which prompt each response of the step answers.
    """
    found: dict[int, Family] = {}
    for i in indices:
        found.setdefault(prompts[i], []).append(i)
    return list(found.values())


def spread(whole: Sequence[Family], hands: int, positions: Positions) -> list[list[Family]]:
    """Families for each of ``hands`` data ranks, so that the busiest has as little as can be.

    The largest family goes to whoever has least, and so on. One is cut where there are fewer than
    hands. Then the busiest hand's largest family is cut, again and again, and the best of these
    deals counts: where two hands are equally busy, only the second cut helps. ``CUTS`` a hand bound
    the work: 0.1 s for 512 prompts on 64 ranks.
    """
    cut = list(whole)
    while len(cut) < hands:
        longest = max(cut, key=len)
        cut.remove(longest)
        cut += _halves(longest)
    parts = sorted((-positions(family), family) for family in cut)
    even = -sum(size for size, _ in parts) / hands
    dealt = best = _largest_first(parts, hands)
    for _ in range(CUTS * hands):
        many = [part for part in dealt[0] if len(part[1]) > 1]
        if not many or _load(best[0]) <= even:
            break
        largest = min(many)
        parts.remove(largest)
        for half in _halves(largest[1]):
            insort(parts, (-positions(half), half))
        dealt = _largest_first(parts, hands)
        best = min(best, dealt, key=lambda deal: [_load(hand) for hand in deal])
    return [[family for _, family in hand] for hand in best]


def fill(whole: Sequence[Family], budget: int, positions: Positions) -> list[list[Family]]:
    """Families by pass of at most ``budget`` positions, the largest pass first.

    A family that is larger is cut into parts that fit; a response that is has a pass of its own.
    """
    parts: list[Family] = []
    for family in whole:
        part: Family = []
        for i in family:
            if part and positions([*part, i]) > budget:
                parts.append(part)
                part = []
            part = [*part, i]
        parts.append(part)
    passes = plan_passes([positions(part) for part in parts], budget, packed=True)
    return [[parts[k] for k in together] for together in passes]


def count_off(whole: Sequence[Family], count: int) -> list[list[Family]]:
    """Families by pass of ``count`` responses; the last pass may have fewer."""
    passes: list[list[Family]] = []
    room = 0
    for family in whole:
        rest = family
        while rest:
            if not room:
                passes.append([])
                room = count
            passes[-1].append(rest[:room])
            taken = len(passes[-1][-1])
            rest, room = rest[taken:], room - taken
    return passes


_Part = tuple[int, Family]
"""A family behind its positions, negative: the largest is the first."""


def _largest_first(parts: Sequence[_Part], hands: int) -> list[list[_Part]]:
    """The sorted parts dealt, each to whoever has least, the busiest hand first."""
    dealt: list[list[_Part]] = [[] for _ in range(hands)]
    loads = [(0, hand) for hand in range(hands)]
    for part in parts:
        load, hand = loads[0]
        dealt[hand].append(part)
        heapreplace(loads, (load - part[0], hand))
    return [dealt[hand] for _, hand in sorted(loads, key=lambda least: (-least[0], least[1]))]


def _load(hand: Sequence[_Part]) -> int:
    return -sum(size for size, _ in hand)


def _halves(family: Family) -> tuple[Family, Family]:
    middle = len(family) // 2
    return family[:middle], family[middle:]
