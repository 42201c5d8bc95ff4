"""Dynamic sampling (DAPO, arXiv:2503.14476, Section 3.2): train on groups that teach something.

A group whose answers are all right, or all wrong, has no advantages. Such groups are dropped, and
further prompts are drawn, answered and graded in their place, round by round, until enough are
left. The verifier's reward decides, not one that was shaped afterwards: a penalty for length
alone is no reason to keep a group that nobody solved.

Prompts, their order and their seeds follow from the recipe, so a step draws the same again.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from qurl_megatron.observe.metrics import Max, Mean, Metric
from qurl_megatron.rewards.pool import Tally
from qurl_megatron.types import Prompt, Sample

LOWEST_SHARE = 0.25  # of useful groups that a round expects: no round is more than 4 times its need

Group = Sequence[Sample]
"""The graded samples of one prompt."""


@dataclass
class Draft:
    """One step's groups in the making.

    Answered rounds stay: when the engines fail, only the last round is asked again.
    """

    asked: Sequence[Prompt]
    """Prompts of the round that is to be answered."""

    wanted: int
    """Groups that the step trains on, all of equal size."""

    max_refills: int | None = None
    """Rounds after the first one; None takes the groups as they come, useful or not."""

    groups: list[Group] = field(default_factory=list)
    """All that were graded so far, in the order in which their prompts were drawn."""

    refills: int = 0
    generating_s: float = 0.0
    grading_s: float = 0.0

    graded: Tally = field(default_factory=Tally)
    """Tally of the rewards of all answers, dropped groups included."""

    def take(self, samples: Sequence[Sample]) -> int:
        """Take in the graded samples of ``asked``, prompt-major.

        Returns:
            How many prompts the next round needs: the missing groups over the share of useful ones
            so far, ``wanted`` at most; 0 where the draft is done.
        """
        size = len(samples) // len(self.asked)
        self.groups += [samples[i : i + size] for i in range(0, len(samples), size)]
        self.asked = ()
        if self.max_refills is None or self.refills == self.max_refills:
            return 0
        useful_groups, count = sum(map(useful, self.groups)), len(self.groups)
        missing = max(self.wanted - useful_groups, 0)
        return min(
            math.ceil(missing * count / max(useful_groups, LOWEST_SHARE * count)), self.wanted
        )

    def refill(self, prompts: Sequence[Prompt]) -> None:
        """Go on with another round."""
        self.asked = prompts
        self.refills += 1

    def chosen(self) -> list[Group]:
        """The groups to train on, in the order in which their prompts were drawn.

        They are the first useful ones. Where these are too few, the first of the others fill up the
        batch: they teach nothing, and their advantages must be 0.
        """
        if self.max_refills is None:
            return self.groups
        places = range(len(self.groups))
        first = sorted(places, key=lambda place: not useful(self.groups[place]))[: self.wanted]
        return [self.groups[place] for place in sorted(first)]

    @property
    def unfilled(self) -> int:
        """Useful groups that are missing."""
        if self.max_refills is None:
            return 0
        return max(self.wanted - sum(map(useful, self.groups)), 0)

    @property
    def generated_tokens(self) -> int:
        """Tokens of all answers, dropped groups included."""
        return sum(sample.written_tokens for group in self.groups for sample in group)

    def metrics(self) -> dict[str, Metric]:
        """Return the shares of kept and dropped groups, and the mean reward of all of them."""
        if self.max_refills is None:
            return {}
        count = len(self.groups)
        useful_groups = sum(map(useful, self.groups))
        solved = sum(not useful(group) and group[0].reward > 0 for group in self.groups)
        rewards = [sample.reward for group in self.groups for sample in group]
        return {
            "reward/mean_generated": Mean(sum(rewards), len(rewards)),
            "sampling/kept_fraction": Mean(useful_groups, count),
            "sampling/all_right_fraction": Mean(solved, count),
            "sampling/all_wrong_fraction": Mean(count - useful_groups - solved, count),
            "sampling/refills": Max(self.refills),
            "sampling/surplus": Max(max(useful_groups - self.wanted, 0)),
            "sampling/unfilled": Max(self.unfilled),
        }


def fill(
    draft: Draft,
    answer: Callable[[Sequence[Prompt]], Sequence[Sample]],
    draw: Callable[[int], Sequence[Prompt]],
) -> Draft:
    """Work on a draft until it is done; where ``answer`` raises, it can be gone on with.

    Args:
        answer: prompts -> their graded samples, prompt-major.
        draw: so many further prompts.
    """
    while missing := draft.take(answer(draft.asked)):
        draft.refill(draw(missing))
    return draft


def useful(group: Group) -> bool:
    """True where the rewards differ: only then does one answer say more than another."""
    return any(sample.reward != group[0].reward for sample in group)
