"""Figures of one load, and why it may not be compared: arithmetic on the moments that were noted.

A step of training waits for the **makespan**, from the first request to the last answer.
Its **tail** is the share in which fewer than half of the batch still run: the engine reads all its
weights for few tokens. Only whole answers count as tokens; a failed request has taken time, and
made none.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np

from qurl_megatron.bench.rollout_load import LoadOutcome, Publication, TimedAnswer

PERCENTILES = (50, 90, 99)
BUSY = 0.8  # of one core, that Python on this side may use
STILL = 4  # looks in a row at which requests wait, and no more of them run
ALIKE = 8  # first tokens that samples of one prompt do not have in common by chance
MORE_ROOM = (
    "give the engine more cache (an embedded one: --cache-gb), or ask for less at once "
    "(--clients concurrency:N)"
)


def makespan(answers: Sequence[TimedAnswer]) -> float:
    """Seconds from the first request to the end of the last."""
    return max(a.ended for a in answers) - min(a.began for a in answers)


def tokens(answers: Iterable[TimedAnswer]) -> int:
    """Tokens of whole answers."""
    return sum(answer.tokens for answer in answers if not answer.failure)


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
    """Seconds from each request to its first token; of answers that came whole, none."""
    return [
        a.times[0] - a.began
        for a in answers
        if not a.failure and a.times and a.counts[0] < a.tokens
    ]


def gaps(answers: Iterable[TimedAnswer]) -> list[float]:
    """Seconds from each token to the next; tokens that came together share theirs evenly."""
    seconds: list[float] = []
    for answer in answers:
        if not answer.failure:
            for gap, count in zip(np.diff(answer.times), np.diff(answer.counts), strict=True):
                seconds += [float(gap) / count] * int(count)
    return seconds


def per_token(answers: Iterable[TimedAnswer]) -> list[float]:
    """Seconds per token of each response, after those that came first."""
    return [
        (a.times[-1] - a.times[0]) / (a.counts[-1] - a.counts[0])
        for a in answers
        if not a.failure and len(a.times) > 1
    ]


def percentiles(values: Sequence[float]) -> dict[int, float]:
    """By ``PERCENTILES``; none of nothing."""
    if not values:
        return {}
    return dict(zip(PERCENTILES, np.percentile(values, PERCENTILES).tolist(), strict=True))


def first_valid(publication: Publication, answers: Iterable[TimedAnswer]) -> float | None:
    """Seconds from the start of a publication to the first token that its weights made.

    None: nothing was left to generate, or the protocol does not say which weights made a token.
    """
    moments = [a.first_of[publication.name] for a in answers if publication.name in a.first_of]
    return min(moments) - publication.began if moments else None


def occupancy(outcome: LoadOutcome) -> tuple[float, float] | None:
    """Mean and highest share of the key/value cache in use; None where the engine reports none."""
    shares = [look.occupancy for look in outcome.looks if look.occupancy is not None]
    return (float(np.mean(shares)), max(shares)) if shares else None


def preemptions(outcome: LoadOutcome) -> int:
    """Times that requests were taken back for lack of room, by answers or the engine's counter.

    A publication takes every response under way back once, which is not counted.
    """
    count = 0
    for answer in outcome.answers:
        published = [p for p in outcome.publications if answer.began < p.ended]
        by_them = sum(p.began < answer.ended for p in published)
        count += max(0, answer.preempted - by_them)
    counters = [look.preemptions for look in outcome.looks if look.preemptions is not None]
    if count or outcome.publications or not counters:
        return count
    return counters[-1] - counters[0]


def reasons(outcome: LoadOutcome, allowed_hits: int) -> dict[str, str]:
    """Return why the load may not be compared: names of ``record.REASONS``, with the observations.

    Args:
        allowed_hits: tokens that a prompt may have in common with one that was there before.
    """
    answers = outcome.answers
    complete = [answer for answer in answers if not answer.failure]
    failed = [answer for answer in answers if answer.failure]
    observations: dict[str, str] = {}
    share = outcome.client_cpu_s / makespan(answers)
    if share > BUSY:
        observations["client-bound"] = (
            f"the client used {share:.0%} of a core; it may use {BUSY:.0%}"
        )
    if wrong := [answer for answer in complete if answer.tokens != answer.ask.tokens]:
        observations["wrong lengths"] = (
            f"{len(wrong)} of {len(answers)} responses; the first has {wrong[0].tokens} tokens, "
            f"where {wrong[0].ask.tokens} were asked for"
        )
    by_group: dict[int, list[TimedAnswer]] = defaultdict(list)
    for answer in complete:
        by_group[answer.ask.group].append(answer)
    if hits := _cache_hits(by_group.values(), allowed_hits):
        observations["cache hits"] = hits
    if failed:
        first = failed[0].failure
        observations["failed requests"] = (
            f"{len(failed)} of {len(answers)} requests; the first: {first}"
        )
    if count := preemptions(outcome):
        observations["preempted requests"] = f"{count} times; {MORE_ROOM}"
    if waited := _waited(outcome):
        observations["requests waited"] = f"{waited}; {MORE_ROOM}"
    same = sum(any(_alike(*pair) for pair in combinations(g, 2)) for g in by_group.values())
    if same:
        observations["identical samples"] = f"in {same} of {len(by_group)} groups"
    if outcome.unpublished:
        observations["failed publication"] = outcome.unpublished
    return observations


def _cache_hits(by_group: Iterable[Sequence[TimedAnswer]], allowed: int) -> str:
    """Look at a group's first response to be computed: the others may find all of its prompt."""
    cached = [[a.cached for a in answers if a.cached is not None] for answers in by_group]
    first = [min(counts) for counts in cached if counts]
    warm = [hits for hits in first if hits > allowed]
    if not warm:
        return ""
    return (
        f"{len(warm)} of {len(first)} prompts were in the cache before anybody had sent them "
        f"(up to {max(warm)} tokens)"
    )


def _waited(outcome: LoadOutcome) -> str:
    """Return how many waited for room: some wait, and no more run than did three looks before.

    Those that wait for their prompts alone begin to run meanwhile.
    """
    looks = [look for look in outcome.looks if look.running is not None]
    stuck = [
        span[-1]
        for span in zip(*(looks[n:] for n in range(STILL)), strict=False)
        if all(look.waiting and 0 < look.running <= span[0].running for look in span)
    ]
    if not stuck:
        return ""
    longest_queue = max(stuck, key=lambda look: look.waiting)
    return f"{longest_queue.waiting} while {longest_queue.running} ran"


def _alike(one: TimedAnswer, other: TimedAnswer) -> bool:
    length = min(len(one.ids), len(other.ids))
    return length >= ALIKE and one.ids[:length] == other.ids[:length]
