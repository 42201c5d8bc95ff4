"""Answers to numbers: per benchmark, over all of them, as JSON and as a table.

A benchmark's problems are a draw from all that could have been asked, and the responses to each are
a draw from the policy. The bootstrap resamples problems, each with all of its responses: the means
of the problems vary by both draws, so the interval covers both. (Resampling the responses of each
resampled problem as well would count their share twice: Davison and Hinkley 1997, section 3.8.)

Between two policies on the same problems, ``Pair`` resamples the change of each problem: the
problems' difficulty cancels out.

Shapes: P = problems, K = responses to each, D = draws of the bootstrap.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qurl_megatron.evaluation.benchmarks import Benchmark, GradedAnswer, Key

DRAWS = 10_000
LEVEL = 0.95
PERCENT = ", %"  # after the name of a column
DIGITS = 6  # written; finer than a few thousand rewards of 0 or 1 can resolve

Answers = Mapping[Key, Sequence[GradedAnswer]]


def resampled_means(mean_P: np.ndarray, seed: Sequence[int], draws: int = DRAWS) -> np.ndarray:
    """Return [D] means over P problems drawn with replacement; other seeds, independent draws."""
    indices = np.random.default_rng(seed).integers(len(mean_P), size=(draws, len(mean_P)))
    return mean_P[indices].mean(axis=1)


def interval(resampled_D: np.ndarray) -> tuple[float, float] | None:
    """Return the percentile interval of resampled means; None if they do not vary.

    If all problems are alike, e.g. none right, a bootstrap has nothing to say.
    """
    if np.ptp(resampled_D) == 0:
        return None
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(resampled_D, [tail, 100 - tail])
    return float(low), float(high)


def pass_at(right_P: Sequence[int], responses: int, k: int) -> float:
    """Estimate, without bias, the chance that one of k responses is right; mean over problems.

    1 - C(n - c, k) / C(n, k) for c right ones of n (Chen et al. 2021, arXiv:2107.03374, Eq. 1).

    Args:
        right_P: right responses to each problem.
        responses: n, to each.
    """
    all_sets = math.comb(responses, k)
    failing = sum(math.comb(responses - right, k) / all_sets for right in right_P)
    return 1 - failing / len(right_P)


@dataclass(frozen=True)
class Score:
    """One benchmark, or the mean over several, in one mode."""

    responses: int  # to each problem
    accuracy: float
    resampled_D: np.ndarray  # accuracy on other draws of problems
    truncated: float  # share of responses
    tokens: float  # of a response, on average
    pass_at: Mapping[int, float]  # of sampled ones, by number of responses
    mean_P: np.ndarray | None = None  # of a single benchmark

    def as_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "k": self.responses,
            "accuracy": round(self.accuracy, DIGITS),
            "ci95": _interval_json(self.resampled_D),
            "truncated": round(self.truncated, DIGITS),
            "tokens": round(self.tokens, DIGITS),
        }
        if self.pass_at:
            document["pass_at"] = {str(k): round(p, DIGITS) for k, p in self.pass_at.items()}
        return document


@dataclass(frozen=True)
class Pair:
    """Two models on the same problems, in one mode."""

    before: Score
    after: Score
    resampled_D: np.ndarray  # the change in accuracy on other draws of problems

    @property
    def change(self) -> float:
        return self.after.accuracy - self.before.accuracy

    def as_json(self) -> dict[str, Any]:
        return {
            "before": self.before.as_json(),
            "after": self.after.as_json(),
            "change": round(self.change, DIGITS),
            "ci95": _interval_json(self.resampled_D),
        }


Scores = dict[str, Score]
Pairs = dict[str, Pair]
"""By mode."""
Line = tuple[str, str, Scores, str]
"""A benchmark's name, number of problems, scores and tokens per second."""


def score(
    benchmark: Benchmark, answers: Answers, responses: Mapping[str, int], seed: int
) -> Scores:
    """Score a benchmark that is fully answered."""
    # Benchmarks of one size must not be resampled alike, or their mean would vary too much.
    seeds = [seed, *benchmark.name.encode()]
    scores = {}
    for mode, count in responses.items():
        rewards: list[list[float]] = []
        every: list[GradedAnswer] = []
        for index in range(len(benchmark.problems)):
            rewards.append([answer.reward for answer in answers[mode, index]])
            every += answers[mode, index]
        reward_PK = np.array(rewards)
        mean_P = reward_PK.mean(axis=1)
        right_P = (reward_PK == 1).sum(axis=1).tolist()
        powers = [2**power for power in range(count.bit_length()) if 2**power < count]
        ks = [*powers, count] if count > 1 else []
        scores[mode] = Score(
            responses=count,
            accuracy=float(reward_PK.mean()),
            resampled_D=resampled_means(mean_P, seeds),
            truncated=float(np.mean([answer.finish == "length" for answer in every])),
            tokens=float(np.mean([answer.tokens for answer in every])),
            pass_at={k: pass_at(right_P, count, k) for k in ks},
            mean_P=mean_P,
        )
    return scores


def mean(scores: Sequence[Scores]) -> Scores:
    """Return the mean over benchmarks, each with the same weight however many problems it has."""
    means = {}
    for mode, first in scores[0].items():
        of_mode = [by_mode[mode] for by_mode in scores]
        chances = {}
        for k in first.pass_at:
            chances[k] = float(np.mean([score.pass_at[k] for score in of_mode]))
        means[mode] = Score(
            responses=first.responses,
            accuracy=float(np.mean([score.accuracy for score in of_mode])),
            resampled_D=np.mean([score.resampled_D for score in of_mode], axis=0),
            truncated=float(np.mean([score.truncated for score in of_mode])),
            tokens=float(np.mean([score.tokens for score in of_mode])),
            pass_at=chances,
        )
    return means


def pairs(name: str, before: Scores, after: Scores, seed: int) -> Pairs:
    """Compare two models on a benchmark, problem by problem."""
    compared = {}
    for mode, later in after.items():
        assert later.mean_P is not None and before[mode].mean_P is not None, "of one benchmark"
        change_P = later.mean_P - before[mode].mean_P
        resampled_D = resampled_means(change_P, [seed, *name.encode()])
        compared[mode] = Pair(before[mode], later, resampled_D)
    return compared


def as_json(by_mode: Mapping[str, Score | Pair]) -> dict[str, Any]:
    return {mode: entry.as_json() for mode, entry in by_mode.items()}


def tokens_per_second(answers: Sequence[GradedAnswer]) -> float:
    tokens = seconds = 0.0
    for answer in answers:
        tokens += answer.tokens
        seconds += answer.seconds
    return tokens / seconds


def rows(benchmark: Benchmark, answers: Answers) -> list[dict[str, Any]]:
    """Return each problem with its share of right responses, by mode."""
    table_rows: list[dict[str, Any]] = [{"id": name} for name in benchmark.problems]
    for (mode, index), of_problem in sorted(answers.items()):
        share = sum(answer.reward for answer in of_problem) / len(of_problem)
        table_rows[index][mode] = round(share, DIGITS)
    return table_rows


def table(lines: Sequence[Line], *, right_or_wrong: bool = True) -> str:
    """Return a Markdown table of scores, in percent if each is ``right_or_wrong``: 1 or 0."""
    unit = PERCENT if right_or_wrong else ""
    sampled = lines[0][2].get("sampled")
    header = ["benchmark", "problems", f"Avg@1{unit}"]
    if sampled:
        header += [f"Avg@{sampled.responses}{unit}", f"pass@{sampled.responses}{PERCENT}"]
    cells = [[*header, f"truncated{PERCENT}", "tokens", "tokens/s"]]
    for name, problems, by_mode, speed in lines:
        row = [name, problems]
        for mode_score in by_mode.values():
            row.append(_mean_text(mode_score.accuracy, mode_score.resampled_D, right_or_wrong))
            if mode_score.pass_at:
                row.append(f"{100 * mode_score.pass_at[mode_score.responses]:.1f}")
        *_, last = by_mode.values()
        cells.append([*row, f"{100 * last.truncated:.1f}", f"{last.tokens:.0f}", speed])
    return aligned(cells)


def pair_table(lines: Sequence[tuple[str, int, Pairs]], *, right_or_wrong: bool = True) -> str:
    """Return a table that compares two models: a line for each benchmark and mode."""
    unit = PERCENT if right_or_wrong else ""
    cells = [["benchmark", "problems", "score", "before", "after", "change"]]
    for name, problems, by_mode in lines:
        for pair in by_mode.values():
            row = [name, str(problems), f"Avg@{pair.after.responses}{unit}"]
            for side in (pair.before, pair.after):
                row.append(_mean_text(side.accuracy, side.resampled_D, right_or_wrong))
            change = _mean_text(pair.change, pair.resampled_D, right_or_wrong, sign="+")
            cells.append([*row, change])
    return aligned(cells)


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table with headings in the first row; the first ``left`` columns are words,
    aligned to the left, the others numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = []
    for column, width in enumerate(widths):
        rule.append("-" * width if column < left else "-" * (width - 1) + ":")
    lines = []
    for row in [rows[0], rule, *rows[1:]]:
        padded = [*map(str.ljust, row[:left], widths), *map(str.rjust, row[left:], widths[left:])]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)


def _mean_text(
    mean: float, resampled_D: np.ndarray, right_or_wrong: bool, *, sign: str = ""
) -> str:
    """Format a mean with its interval: in percent, or as the scores are."""

    def text(value: float) -> str:
        return f"{100 * value:{sign}.1f}" if right_or_wrong else f"{value:{sign}.3f}"

    if (ends := interval(resampled_D)) is None:
        return text(mean)
    return f"{text(mean)} [{text(ends[0])}, {text(ends[1])}]"


def _interval_json(resampled_D: np.ndarray) -> list[float] | None:
    ends = interval(resampled_D)
    return [round(end, DIGITS) for end in ends] if ends else None
