"""One step's groups of graded samples: which are trained on, and their metrics.

Dynamic sampling (DAPO, arXiv:2503.14476, Section 3.2) trains on groups that teach something. A
group whose answers are all right, or all wrong, has no advantages. Such groups are dropped, and
further prompts are drawn, answered and graded in their place, round by round, until enough are
left. The verifier's reward decides, not one that was shaped afterwards: a penalty for length
alone is no reason to keep a group that nobody solved.

Prompts, their order and their seeds follow from the recipe, so a step draws the same again.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from qurl_megatron.data.responses import Summary
from qurl_megatron.observe.metrics import Max, Mean, Metric, Sum
from qurl_megatron.observe.samples import telling
from qurl_megatron.rewards.pool import Tally
from qurl_megatron.types import Prompt, Sample

LOWEST_SHARE = 0.25  # of useful groups, the least assumed: no round draws over 4 times its need
ENVIRONMENT_CAUSES = ("timeouts", "crashes", "exceptions", "invalid")

Group = Sequence[Sample]
"""The graded samples of one prompt."""


def useful(group: Group) -> bool:
    """Return whether rewards differ: only then does one answer say more than another."""
    return any(sample.reward != group[0].reward for sample in group)


@dataclass
class Draft:
    """One step's groups in the making.

    Answered rounds stay: when the engines fail, only the last round is asked again.
    """

    prompts: Sequence[Prompt]
    """Prompts of the round to answer next."""

    group_count: int
    """Groups that the step trains on, all of equal size."""

    max_refills: int | None = None
    """Rounds after the first one; None takes the groups as they come, useful or not."""

    groups: list[Group] = field(default_factory=list)
    """All groups graded so far, in the order in which their prompts were drawn."""

    refills: int = 0
    generating_s: float = 0.0
    grading_s: float = 0.0

    graded: Tally = field(default_factory=Tally)
    """Rewards of all answers, dropped groups included."""

    @property
    def useful_groups(self) -> int:
        return sum(map(useful, self.groups))

    @property
    def unfilled(self) -> int:
        """Useful groups that are missing."""
        if self.max_refills is None:
            return 0
        return max(self.group_count - self.useful_groups, 0)

    @property
    def generated_tokens(self) -> int:
        """Tokens of all answers, dropped groups included."""
        return sum(sample.written_tokens for group in self.groups for sample in group)

    def take(self, samples: Sequence[Sample]) -> int:
        """Add the graded samples of ``prompts``, prompt-major.

        Returns:
            How many prompts the next round needs: the missing groups over the share of useful ones
            so far, ``group_count`` at most; 0 where the draft is done.
        """
        size = len(samples) // len(self.prompts)
        self.groups += [samples[i : i + size] for i in range(0, len(samples), size)]
        self.prompts = ()
        if self.max_refills is None or self.refills == self.max_refills:
            return 0
        count = len(self.groups)
        assumed_useful = max(self.useful_groups, LOWEST_SHARE * count)
        return min(math.ceil(self.unfilled * count / assumed_useful), self.group_count)

    def chosen(self) -> list[Group]:
        """Return the groups to train on, in the order in which their prompts were drawn.

        They are the first useful ones. Where these are too few, the first of the others fill up the
        batch: they teach nothing, and their advantages must be 0.
        """
        if self.max_refills is None:
            return self.groups
        places = range(len(self.groups))
        first = sorted(places, key=lambda place: not useful(self.groups[place]))[: self.group_count]
        return [self.groups[place] for place in sorted(first)]

    def metrics(self) -> dict[str, Metric]:
        """Return the shares of kept and dropped groups, and the mean reward of all of them."""
        if self.max_refills is None:
            return {}
        count = len(self.groups)
        useful_groups = self.useful_groups
        solved = sum(not useful(group) and group[0].reward > 0 for group in self.groups)
        rewards = [sample.reward for group in self.groups for sample in group]
        return {
            "reward/mean_generated": Mean(sum(rewards), len(rewards)),
            "sampling/kept_fraction": Mean(useful_groups, count),
            "sampling/all_right_fraction": Mean(solved, count),
            "sampling/all_wrong_fraction": Mean(count - useful_groups - solved, count),
            "sampling/refills": Max(self.refills),
            "sampling/surplus": Max(max(useful_groups - self.group_count, 0)),
            "sampling/unfilled": Max(self.unfilled),
        }


def fill(
    draft: Draft,
    answer: Callable[[Sequence[Prompt]], Sequence[Sample]],
    draw: Callable[[int], Sequence[Prompt]],
) -> Draft:
    """Work on a draft until it is done; where ``answer`` raises, it can be filled further.

    Args:
        answer: prompts -> their graded samples, prompt-major.
        draw: count -> that many further prompts.
    """
    while missing := draft.take(answer(draft.prompts)):
        draft.prompts = draw(missing)
        draft.refills += 1
    return draft


def example_indices(summary: Summary, count: int) -> list[int]:
    """Return which responses are kept as examples, the same on every rank."""
    return telling(summary.rewards_R.tolist(), summary.prompts_R.tolist(), count)


def sample_metrics(samples: Sequence[Sample], *, newest: int) -> dict[str, Metric]:
    """Return metrics of lengths and versions; ``newest`` is the version they should come from."""
    tokens = sum(sample.written_tokens for sample in samples)
    oldest = min((v for sample in samples for v, _ in sample.versions), default=newest)
    return {
        "sync/version": Max(newest),
        "sync/staleness": Max(newest - oldest),
        "response/length": Mean(tokens, len(samples)),
        "response/truncated": Mean(sum(sample.truncated for sample in samples), len(samples)),
    }


def reward_metrics(samples: Sequence[Sample]) -> dict[str, Metric]:
    """Return mean and spread of the verifier's rewards; nothing where there are no samples."""
    if not samples:
        return {}
    rewards = [sample.reward for sample in samples]
    mean = sum(rewards) / len(rewards)
    return {
        "reward/mean": Mean(sum(rewards), len(rewards)),
        "reward/std": Max(math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))),
    }


def routing_metrics(samples: Sequence[Sample]) -> dict[str, Metric]:
    """Return the share of tokens without an engine's choice of experts; last ones need none."""
    tokens = sum(len(s.prompt.input_ids) + len(s.response_ids) - 1 for s in samples)
    chosen = sum(int(s.routes[:, 0, 0].astype(bool).sum()) for s in samples if s.routes is not None)
    return {"rollout/routes_missing_fraction": Mean(tokens - chosen, tokens)}


def conversation_metrics(samples: Sequence[Sample]) -> dict[str, Metric]:
    """Return the number of turns, the environment's tokens, and its failures by cause."""
    count = len(samples)
    failures = Counter(sample.failure.cause for sample in samples if sample.failure)
    environment_tokens = sum(len(sample.response_ids) - sample.written_tokens for sample in samples)
    metrics: dict[str, Metric] = {
        "environment/turns": Mean(sum(len(sample.turns) for sample in samples), count),
        "environment/tokens": Mean(environment_tokens, count),
        "environment/left_out": Mean(sum(sample.left_out for sample in samples), count),
        "environment/failed_fraction": Mean(failures.total(), count),
    }
    for cause in ENVIRONMENT_CAUSES:
        metrics[f"environment/{cause}"] = Sum(failures[cause])
    return metrics
