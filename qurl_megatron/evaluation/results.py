"""Answers to numbers: per benchmark, over all of them, as JSON and as a table.

``results.json`` is documented in docs/evaluation.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from qurl_megatron.evaluation.answers import GradedAnswer, Key
from qurl_megatron.evaluation.benchmarks import ProblemSet
from qurl_megatron.evaluation.estimates import interval, pass_at, resampled_means, sampling_error

PERCENT = ", %"  # after the name of a column
DIGITS = 6  # of what is written: more than a few thousand rewards of 0 or 1 can tell


@dataclass(frozen=True)
class BenchmarkScore:
    """One benchmark, or the mean over several, in one mode."""

    responses: int  # to each problem
    accuracy: float
    resampled_D: np.ndarray  # accuracy on other draws of problems
    truncated: float  # share of responses
    tokens: float  # of a response, on average
    sampling_error: float | None = None
    pass_at: Mapping[int, float] | None = None

    def as_json(self) -> dict[str, Any]:
        found = {
            "k": self.responses,
            "accuracy": _rounded(self.accuracy),
            "ci95": _rounded(interval(self.resampled_D)),
            "truncated": _rounded(self.truncated),
            "tokens": _rounded(self.tokens),
        }
        if self.sampling_error is not None:
            found["sampling_error"] = _rounded(self.sampling_error)
        if self.pass_at is not None:
            found["pass_at"] = {str(k): _rounded(value) for k, value in self.pass_at.items()}
        return found


def score(
    benchmark: ProblemSet,
    answers: Mapping[Key, Sequence[GradedAnswer]],
    responses: Mapping[str, int],
    seed: int,
) -> dict[str, BenchmarkScore]:
    """The scores of a benchmark that is fully answered, by mode."""
    found = {}
    for mode, count in responses.items():
        rows = [answers[mode, index] for index in range(len(benchmark.problems))]
        reward_PK = np.array([[answer.reward for answer in row] for row in rows])
        # Benchmarks of one size must not be resampled alike, or their mean would vary too much.
        resampled_D = resampled_means(reward_PK.mean(axis=1), [seed, *benchmark.name.encode()])
        every = [answer for row in rows for answer in row]
        right_P = (reward_PK == 1).sum(axis=1).tolist()
        found[mode] = BenchmarkScore(
            responses=count,
            accuracy=float(reward_PK.mean()),
            resampled_D=resampled_D,
            truncated=float(np.mean([answer.finish == "length" for answer in every])),
            tokens=float(np.mean([answer.tokens for answer in every])),
            sampling_error=sampling_error(reward_PK) if count > 1 else None,
            pass_at={k: pass_at(right_P, count, k) for k in _powers(count)} if count > 1 else None,
        )
    return found


def mean(scores: Sequence[Mapping[str, BenchmarkScore]]) -> dict[str, BenchmarkScore]:
    """The mean over benchmarks, each with the same weight however many problems it has."""
    found = {}
    for mode in scores[0]:
        each = [by_mode[mode] for by_mode in scores]
        sampled = each[0].pass_at is not None
        found[mode] = BenchmarkScore(
            responses=each[0].responses,
            accuracy=_mean(one.accuracy for one in each),
            resampled_D=np.mean([one.resampled_D for one in each], axis=0),
            truncated=_mean(one.truncated for one in each),
            tokens=_mean(one.tokens for one in each),
            sampling_error=sum((one.sampling_error or 0.0) ** 2 for one in each) ** 0.5 / len(each)
            if sampled
            else None,
            pass_at={k: _mean((one.pass_at or {})[k] for one in each) for k in each[0].pass_at}
            if each[0].pass_at is not None
            else None,
        )
    return found


@dataclass(frozen=True)
class Pair:
    """Two models on the same problems, in one mode."""

    before: BenchmarkScore
    after: BenchmarkScore
    resampled_D: np.ndarray  # the change in accuracy on other draws of problems

    @property
    def change(self) -> float:
        return self.after.accuracy - self.before.accuracy


def pair(
    benchmark: ProblemSet,
    before: Mapping[Key, Sequence[GradedAnswer]],
    after: Mapping[Key, Sequence[GradedAnswer]],
    responses: Mapping[str, int],
    seed: int,
) -> dict[str, Pair]:
    """Two fully answered benchmarks, by mode. What is resampled is the change of each problem: how
    hard problems are cancels out."""
    scores = [score(benchmark, answers, responses, seed) for answers in (before, after)]
    found = {}
    for mode in responses:
        means = [
            [
                _mean(answer.reward for answer in answers[mode, index])
                for index in range(len(benchmark.problems))
            ]
            for answers in (before, after)
        ]
        change_P = np.subtract(means[1], means[0])
        resampled_D = resampled_means(change_P, [seed, *benchmark.name.encode()])
        found[mode] = Pair(scores[0][mode], scores[1][mode], resampled_D)
    return found


def mean_pair(pairs: Sequence[Mapping[str, Pair]]) -> dict[str, Pair]:
    """The mean over benchmarks, as ``mean``."""
    before = mean([{mode: one.before for mode, one in by_mode.items()} for by_mode in pairs])
    after = mean([{mode: one.after for mode, one in by_mode.items()} for by_mode in pairs])
    return {
        mode: Pair(
            before[mode],
            after[mode],
            np.mean([by_mode[mode].resampled_D for by_mode in pairs], axis=0),
        )
        for mode in pairs[0]
    }


def pair_as_json(pairs: Mapping[str, Pair]) -> dict[str, Any]:
    return {
        mode: {
            "before": one.before.as_json(),
            "after": one.after.as_json(),
            "change": _rounded(one.change),
            "ci95": _rounded(interval(one.resampled_D)),
        }
        for mode, one in pairs.items()
    }


def pair_table(
    lines: Sequence[tuple[str, int | None, Mapping[str, Pair]]], *, right_or_wrong: bool = True
) -> str:
    """Text that is a Markdown table as well: a line for each benchmark and mode.

    Args:
        lines: name, number of problems, and the two models' scores.
        right_or_wrong: each score is 1 or 0, and means are percentages.
    """
    written = partial(_written, right_or_wrong=right_or_wrong)
    unit = PERCENT if right_or_wrong else ""
    cells = [["benchmark", "problems", "score", "before", "after", "change"]]
    for name, problems, pairs in lines:
        count = "" if problems is None else str(problems)
        for one in pairs.values():
            scores = [
                written(score.accuracy, score.resampled_D) for score in (one.before, one.after)
            ]
            change = written(one.change, one.resampled_D, sign="+")
            cells.append([name, count, f"Avg@{one.after.responses}{unit}", *scores, change])
    return _aligned(cells)


def tokens_per_second(answers: Mapping[Key, Sequence[GradedAnswer]]) -> float:
    every = [answer for found in answers.values() for answer in found]
    return sum(answer.tokens for answer in every) / sum(answer.seconds for answer in every)


def weight_versions(answers: Mapping[Key, Sequence[GradedAnswer]]) -> list[int]:
    """More than one: somebody published to the engines meanwhile, and no one policy was scored."""
    return sorted({answer.version for found in answers.values() for answer in found})


def rows(
    benchmark: ProblemSet, answers: Mapping[Key, Sequence[GradedAnswer]]
) -> list[dict[str, Any]]:
    """Each problem with its share of right responses, by mode."""
    found: list[dict[str, Any]] = [{"id": problem.id} for problem in benchmark.problems]
    for (mode, index), given in sorted(answers.items()):
        found[index][mode] = _rounded(_mean(answer.reward for answer in given))
    return found


def table(
    lines: Sequence[tuple[str, int | None, Mapping[str, BenchmarkScore], float | None]],
    *,
    right_or_wrong: bool = True,
) -> str:
    """Text that is a Markdown table as well.

    Args:
        lines: name, number of problems, scores and tokens per second.
        right_or_wrong: each score is 1 or 0, and means are percentages.
    """

    def written(score: BenchmarkScore) -> str:
        return _written(score.accuracy, score.resampled_D, right_or_wrong=right_or_wrong)

    modes = lines[0][2]
    sampled = modes.get("sampled")
    k = sampled.responses if sampled else 1
    unit = PERCENT if right_or_wrong else ""
    header = ["benchmark", "problems", f"Avg@1{unit}"]
    header += [f"Avg@{k}{unit}", f"pass@{k}{PERCENT}"] if sampled else []
    cells = [[*header, f"truncated{PERCENT}", "tokens", "tokens/s"]]
    for name, problems, by_mode, speed in lines:
        last = by_mode["sampled" if sampled else "greedy"]
        cells.append([name, "" if problems is None else str(problems), written(by_mode["greedy"])])
        if sampled:
            cells[-1] += [written(last), f"{100 * (last.pass_at or {})[k]:.1f}"]
        cells[-1] += [
            f"{100 * last.truncated:.1f}",
            f"{last.tokens:.0f}",
            "" if speed is None else f"{speed:.0f}",
        ]
    return _aligned(cells)


def _aligned(cells: Sequence[Sequence[str]]) -> str:
    """A table with the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [
        [
            row[0].ljust(widths[0]),
            *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
        ]
        for row in [cells[0], rule, *cells[1:]]
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def _written(mean: float, resampled_D: np.ndarray, *, right_or_wrong: bool, sign: str = "") -> str:
    """A mean with its interval: in percent, or as the scores are."""

    def one(value: float) -> str:
        return f"{100 * value:{sign}.1f}" if right_or_wrong else f"{value:{sign}.3f}"

    between = interval(resampled_D)
    return f"{one(mean)} [{one(between[0])}, {one(between[1])}]" if between else one(mean)


def _powers(count: int) -> list[int]:
    """1, 2, 4, ..., and the count itself."""
    return [*(2**i for i in range(count.bit_length()) if 2**i < count), count]


def _mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


def _rounded(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_rounded(one) for one in value]
    return value if value is None else round(value, DIGITS)
