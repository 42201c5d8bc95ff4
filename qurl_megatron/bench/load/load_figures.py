"""Figures of one load, as arithmetic on the moments that were noted.

What a step of training waits for is the **makespan**, from the first request to the last answer.
Its **tail** is the share in which fewer than half of the batch still run: the engine reads all its
weights for few tokens. Only whole answers count as tokens; a failed request has taken time, and
made none.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from qurl_megatron.bench.load.outcome import LoadOutcome, Publication, TimedAnswer

PERCENTILES = (50, 90, 99)


def makespan(answers: Sequence[TimedAnswer]) -> float:
    """Seconds from the first request to the end of the last."""
    return max(a.over for a in answers) - min(a.began for a in answers)


def tokens(answers: Iterable[TimedAnswer]) -> int:
    """Of whole answers."""
    return sum(answer.tokens for answer in answers if answer.done)


def tail_share(answers: Sequence[TimedAnswer]) -> float:
    """Share of the makespan, after most were under way at once, with fewer than half of them."""
    changes = sorted([(a.began, 1) for a in answers] + [(a.ended, -1) for a in answers])
    running = np.cumsum([change for _, change in changes])
    moments = np.array([at for at, _ in changes])
    fullest = int(np.flatnonzero(running == running.max())[-1])
    spans = np.diff(moments[fullest:])
    few = running[fullest:-1] < running.max() / 2
    return float(spans[few].sum() / makespan(answers))


def first_token(answers: Iterable[TimedAnswer]) -> list[float]:
    """Seconds from each request to its first token."""
    return [a.times[0] - a.began for a in answers if a.done and a.times]


def gaps(answers: Iterable[TimedAnswer]) -> list[float]:
    """Seconds from each token to the next of its response; tokens that came together share theirs
    evenly."""
    found: list[float] = []
    for answer in answers:
        if answer.done:
            for seconds, count in zip(np.diff(answer.times), np.diff(answer.counts), strict=True):
                found += [float(seconds) / count] * int(count)
    return found


def per_token(answers: Iterable[TimedAnswer]) -> list[float]:
    """Seconds per token of each response, after those that came first."""
    return [
        (a.times[-1] - a.times[0]) / (a.counts[-1] - a.counts[0])
        for a in answers
        if a.done and len(a.times) > 1
    ]


def percentiles(values: Sequence[float]) -> dict[int, float]:
    """By ``PERCENTILES``; none of nothing."""
    if not values:
        return {}
    return dict(zip(PERCENTILES, np.percentile(values, PERCENTILES).tolist(), strict=True))


def first_valid(publication: Publication, answers: Iterable[TimedAnswer]) -> float | None:
    """Seconds from the start of a publication to the first token that its weights made; None:
    nothing was left to generate, or the protocol does not say which weights made a token."""
    moments = [a.first_of[publication.name] for a in answers if publication.name in a.first_of]
    return min(moments) - publication.began if moments else None


def recomputed(publication: Publication, answers: Iterable[TimedAnswer]) -> int:
    """Tokens whose keys and values the new weights made old: those of all responses under way,
    prompts once per response."""
    at = publication.began
    return sum(
        len(a.ask.prompt) + a.had(at) for a in answers if a.times and a.times[0] <= at < a.over
    )


def wrong_lengths(answers: Iterable[TimedAnswer]) -> list[TimedAnswer]:
    """Whole answers that do not have the length that was asked for."""
    return [a for a in answers if a.done and a.tokens != a.ask.tokens]


def occupancy(outcome: LoadOutcome) -> tuple[float, float] | None:
    """Mean and highest share of the key/value cache in use; None where the engine reports none."""
    seen = [look.occupancy for look in outcome.looks if look.occupancy is not None]
    return (float(np.mean(seen)), max(seen)) if seen else None


def preemptions(outcome: LoadOutcome) -> int:
    """Times that requests were taken back for lack of room, by answers or the engine's counter.

    A publication takes every response under way back once, which is not counted.
    """
    found = 0
    for answer in outcome.answers:
        published = [p for p in outcome.publications if answer.began < p.ended]
        by_them = sum(p.began < answer.over for p in published)
        found += max(0, answer.preempted - by_them)
    told = [look.preemptions for look in outcome.looks if look.preemptions is not None]
    if found or outcome.publications or not told:
        return found
    return told[-1] - told[0]
