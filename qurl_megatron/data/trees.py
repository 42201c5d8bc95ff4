"""Responses to one prompt as a tree, so that the model reads the prompt once; of lengths alone.

A tree's prefix is the prompt without its last token, and each response is a branch that goes on
from there. A branch begins with the prompt's last token, because it is there that a response's
first token is predicted, another one in each branch; it ends before the response's last token,
which predicts nothing. A response that has its prompt to itself is a branch without a prefix.

A family is a list of responses to the same prompt; to be cut costs it one prefix more.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from qurl_megatron.data.passes import plan_passes

Family = list[int]  # indices of responses
Cost = Callable[[Family], int]
"""Positions that a family takes."""


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


def spread(whole: Sequence[Family], hands: int, cost: Cost) -> list[list[Family]]:
    """Families for each of ``hands`` data ranks, so that the busiest has as little as can be.

    The largest family goes to whoever has least, and so on. One is cut where there are fewer than
    hands, and as long as the busiest hand has less for it.
    """
    parts = list(whole)
    while len(parts) < hands:
        parts = _halved(parts, max(parts, key=len))

    def load(hand: list[Family]) -> int:
        return sum(map(cost, hand))

    dealt = _largest_first(parts, hands, cost)
    while many := [part for part in max(dealt, key=load) if len(part) > 1]:
        cut = _halved(parts, max(many, key=cost))
        tried = _largest_first(cut, hands, cost)
        if max(map(load, tried)) >= max(map(load, dealt)):
            break
        parts, dealt = cut, tried
    return dealt


def fill(whole: Sequence[Family], budget: int, cost: Cost) -> list[list[Family]]:
    """Families by pass of at most ``budget`` positions, the largest pass first.

    A family that is larger is cut into parts that fit; a response that is has a pass of its own.
    """
    parts: list[Family] = []
    for family in whole:
        part: Family = []
        for i in family:
            if part and cost([*part, i]) > budget:
                parts.append(part)
                part = []
            part = [*part, i]
        parts.append(part)
    passes = plan_passes([cost(part) for part in parts], budget, packed=True)
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


def _largest_first(parts: Sequence[Family], hands: int, cost: Cost) -> list[list[Family]]:
    dealt: list[list[Family]] = [[] for _ in range(hands)]
    loads = [0] * hands
    for part in sorted(parts, key=lambda part: (-cost(part), part)):
        least = loads.index(min(loads))
        dealt[least].append(part)
        loads[least] += cost(part)
    return dealt


def _halved(parts: Sequence[Family], one: Family) -> list[Family]:
    middle = len(one) // 2
    return [*(part for part in parts if part is not one), one[:middle], one[middle:]]
