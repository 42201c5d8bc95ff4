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
        document = {
            "k": self.responses,
            "accuracy": _rounded(self.accuracy),
            "ci95": _rounded(interval(self.resampled_D)),
            "truncated": _rounded(self.truncated),
            "tokens": _rounded(self.tokens),
        }
        if self.sampling_error is not None:
            document["sampling_error"] = _rounded(self.sampling_error)
        if self.pass_at is not None:
            document["pass_at"] = {str(k): _rounded(value) for k, value in self.pass_at.items()}
        return document


def score(
    benchmark: ProblemSet,
    answers: Mapping[Key, Sequence[GradedAnswer]],
    responses: Mapping[str, int],
    seed: int,
) -> dict[str, BenchmarkScore]:
    """The scores of a benchmark that is fully answered, by mode."""
    scores = {}
    for mode, count in responses.items():
        rows = [answers[mode, index] for index in range(len(benchmark.problems))]
        reward_PK = np.array([[answer.reward for answer in row] for row in rows])
        # Benchmarks of one size must not be resampled alike, or their mean would vary too much.
        resampled_D = resampled_means(reward_PK.mean(axis=1), [seed, *benchmark.name.encode()])
        every = [answer for row in rows for answer in row]
        right_P = (reward_PK == 1).sum(axis=1).tolist()
        scores[mode] = BenchmarkScore(
            responses=count,
            accuracy=float(reward_PK.mean()),
            resampled_D=resampled_D,
            truncated=float(np.mean([answer.finish == "length" for answer in every])),
            tokens=float(np.mean([answer.tokens for answer in every])),
            sampling_error=sampling_error(reward_PK) if count > 1 else None,
            pass_at={k: pass_at(right_P, count, k) for k in _powers(count)} if count > 1 else None,
        )
    return scores


def mean(scores: Sequence[Mapping[str, BenchmarkScore]]) -> dict[str, BenchmarkScore]:
    """The mean over benchmarks, each with the same weight however many problems it has."""
    means = {}
    for mode in scores[0]:
        each = [by_mode[mode] for by_mode in scores]
        sampled = each[0].pass_at is not None
        means[mode] = BenchmarkScore(
            responses=each[0].responses,
            accuracy=_mean(benchmark_score.accuracy for benchmark_score in each),
            resampled_D=np.mean([benchmark_score.resampled_D for benchmark_score in each], axis=0),
            truncated=_mean(benchmark_score.truncated for benchmark_score in each),
            tokens=_mean(benchmark_score.tokens for benchmark_score in each),
            sampling_error=sum(
                (benchmark_score.sampling_error or 0.0) ** 2 for benchmark_score in each
            )
            ** 0.5
            / len(each)
            if sampled
            else None,
            pass_at={
                k: _mean((benchmark_score.pass_at or {})[k] for benchmark_score in each)
                for k in each[0].pass_at
            }
            if each[0].pass_at is not None
            else None,
        )
    return means


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
    pairs = {}
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
        pairs[mode] = Pair(scores[0][mode], scores[1][mode], resampled_D)
    return pairs


def mean_pair(pairs: Sequence[Mapping[str, Pair]]) -> dict[str, Pair]:
    """The mean over benchmarks, as ``mean``."""
    before = mean(
        [{mode: mode_pair.before for mode, mode_pair in by_mode.items()} for by_mode in pairs]
    )
    after = mean(
        [{mode: mode_pair.after for mode, mode_pair in by_mode.items()} for by_mode in pairs]
    )
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
            "before": mode_pair.before.as_json(),
            "after": mode_pair.after.as_json(),
            "change": _rounded(mode_pair.change),
            "ci95": _rounded(interval(mode_pair.resampled_D)),
        }
        for mode, mode_pair in pairs.items()
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
        for mode_pair in pairs.values():
            scores = [
                written(score.accuracy, score.resampled_D)
                for score in (mode_pair.before, mode_pair.after)
            ]
            change = written(mode_pair.change, mode_pair.resampled_D, sign="+")
            cells.append([name, count, f"Avg@{mode_pair.after.responses}{unit}", *scores, change])
    return _aligned(cells)


def tokens_per_second(answers: Mapping[Key, Sequence[GradedAnswer]]) -> float:
    every = [answer for answers_of_problem in answers.values() for answer in answers_of_problem]
    return sum(answer.tokens for answer in every) / sum(answer.seconds for answer in every)


def weight_versions(answers: Mapping[Key, Sequence[GradedAnswer]]) -> list[int]:
    """More than one: somebody published to the engines meanwhile, and no one policy was scored."""
    return sorted(
        {answer.version for answers_of_problem in answers.values() for answer in answers_of_problem}
    )


def rows(
    benchmark: ProblemSet, answers: Mapping[Key, Sequence[GradedAnswer]]
) -> list[dict[str, Any]]:
    """Each problem with its share of right responses, by mode."""
    table_rows: list[dict[str, Any]] = [{"id": problem.id} for problem in benchmark.problems]
    for (mode, index), answers_of_problem in sorted(answers.items()):
        table_rows[index][mode] = _rounded(_mean(answer.reward for answer in answers_of_problem))
    return table_rows


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
        return [_rounded(element) for element in value]
    return value if value is None else round(value, DIGITS)
