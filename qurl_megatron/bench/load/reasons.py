"""Why a load's figures may not be compared with others: one test per name in ``REASONS``.

Each test says what it found in a few words, or nothing. What only shows between repeats (the
yardstick, the engine's own version) is added where the repeats are.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import combinations

import numpy as np

from qurl_megatron.bench.load import load_figures
from qurl_megatron.bench.load.outcome import LoadOutcome, TimedAnswer

BUSY = 0.8  # of one core, that Python on this side may use
TOO_LATE = 0.5  # of the median gap between tokens, that this side's event loop may be late
STILL = 4  # looks in a row at which requests wait, and no more of them run
MORE_ROOM = (
    "give the engine more cache (an embedded one: --cache-gb), or ask for less at once "
    "(--clients concurrency:N)"
)
ALIKE = 8  # first tokens that samples of one prompt do not have in common by chance


def client_bound(outcome: LoadOutcome, allowed: int) -> str:
    if outcome.client is None:
        return ""
    share = outcome.client.cpu_s / load_figures.makespan(outcome.answers)
    if share > BUSY:
        return f"the client used {share:.0%} of a core; it may use {BUSY:.0%}"
    gaps = load_figures.gaps(outcome.answers)
    if gaps and outcome.client.lags:
        late, gap = np.percentile(outcome.client.lags, 90), np.median(gaps)
        if late > TOO_LATE * gap:
            return (
                f"every tenth time the client woke {1e3 * late:.1f} ms late or more, with "
                f"{1e3 * gap:.1f} ms between tokens"
            )
    return ""


def wrong_lengths(outcome: LoadOutcome, allowed: int) -> str:
    wrong = load_figures.wrong_lengths(outcome.answers)
    if not wrong:
        return ""
    first = wrong[0]
    return (
        f"{len(wrong)} of {len(outcome.answers)} responses; the first has {first.tokens} tokens, "
        f"where {first.ask.tokens} were asked for"
    )


def cache_hits(outcome: LoadOutcome, allowed: int) -> str:
    """Of a group's first response to be computed: what its own prompt has in common with others is
    a few tokens; the other responses may find all of it."""
    groups = defaultdict(list)
    for answer in outcome.answers:
        if answer.done and answer.cached is not None:
            groups[answer.ask.group].append(answer.cached)
    warm = [min(cached) for cached in groups.values() if min(cached) > allowed]
    if not warm:
        return ""
    return (
        f"{len(warm)} of {len(groups)} prompts were in the cache before anybody had sent them "
        f"(up to {max(warm)} tokens)"
    )


def failed(outcome: LoadOutcome, allowed: int) -> str:
    found = [answer for answer in outcome.answers if not answer.done]
    if not found:
        return ""
    return f"{len(found)} of {len(outcome.answers)} requests; the first: {found[0].failure}"


def preempted(outcome: LoadOutcome, allowed: int) -> str:
    count = load_figures.preemptions(outcome)
    return f"{count} times; {MORE_ROOM}" if count else ""


def waited(outcome: LoadOutcome, allowed: int) -> str:
    """For room, of requests that are sent without a rate: some wait, and no more of them run than
    did three looks before. Those that wait for their prompts alone begin to run meanwhile."""
    if any(answer.ask.due is not None for answer in outcome.answers):
        return ""
    looks = [look for look in outcome.looks if look.running is not None]
    stuck = [
        span[-1]
        for span in zip(*(looks[n:] for n in range(STILL)), strict=False)
        if all(look.waiting and 0 < look.running <= span[0].running for look in span)
    ]
    if not stuck:
        return ""
    most = max(stuck, key=lambda look: look.waiting)
    return f"{most.waiting} while {most.running} ran; {MORE_ROOM}"


def identical(outcome: LoadOutcome, allowed: int) -> str:
    groups: dict[int, list[TimedAnswer]] = defaultdict(list)
    for answer in outcome.answers:
        if answer.done:
            groups[answer.ask.group].append(answer)
    same = sum(any(_alike(*pair) for pair in combinations(g, 2)) for g in groups.values())
    return f"in {same} of {len(groups)} groups" if same else ""


def _alike(one: TimedAnswer, other: TimedAnswer) -> bool:
    length = min(len(one.ids), len(other.ids))
    return length >= ALIKE and one.ids[:length] == other.ids[:length]


def wrong_requests(outcome: LoadOutcome, allowed: int) -> str:
    return outcome.unasked


def unpublished(outcome: LoadOutcome, allowed: int) -> str:
    return outcome.unpublished


TESTS: Mapping[str, Callable[[LoadOutcome, int], str]] = {
    "client-bound": client_bound,
    "wrong requests": wrong_requests,
    "wrong lengths": wrong_lengths,
    "cache hits": cache_hits,
    "failed requests": failed,
    "preempted requests": preempted,
    "requests waited": waited,
    "identical samples": identical,
    "failed publication": unpublished,
}


def found(outcome: LoadOutcome, allowed_hits: int) -> dict[str, str]:
    """The names of ``TESTS`` that apply, each with what was found.

    Args:
        allowed_hits: tokens that a prompt may have in common with one that was there before.
    """
    told = {name: test(outcome, allowed_hits) for name, test in TESTS.items()}
    return {name: text for name, text in told.items() if text}


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """What an engine said of itself, and says otherwise now; of "engine changed"."""
    names = [name for name in (*before, *after) if before.get(name) != after.get(name)]
    return "; ".join(
        f"{name} was {before.get(name)}, is {after.get(name)}" for name in dict.fromkeys(names)
    )
