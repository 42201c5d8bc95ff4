"""Every reason not to compare a load, each planted into one that is valid without it."""

import pytest

from qurl_megatron.bench import load_figures
from qurl_megatron.bench.record import REASONS
from qurl_megatron.bench.rollout_load import Ask, LoadOutcome, Look, TimedAnswer


@pytest.fixture
def outcome():
    """Two groups of two, 10 tokens each at 0.1 s; the second of a group finds its prompt cached."""
    answers = []
    for group in range(2):
        for sample in range(2):
            ids = [100 * group + 10 * sample + place for place in range(10)]
            times = [0.1 * (place + 1) for place in range(10)]
            ask = Ask(group, (7,) * 16, tokens=10)
            cached = 15 if sample else 0
            answers.append(TimedAnswer(ask, 0.0, times, list(range(1, 11)), 1.0, "", ids, cached))
    looks = [Look(preemptions=5), Look(preemptions=5)]
    return LoadOutcome(answers, looks=looks, client_cpu_s=0.2)


def names(outcome):
    return list(load_figures.reasons(outcome, allowed_hits=1))


def test_every_reason_has_a_sentence(outcome):
    outcome.unpublished = "engine-0 rejects version 2"
    outcome.client_cpu_s = 2.0
    outcome.answers[1].failure = "cut off"
    outcome.answers[2].cached = 15
    assert len(names(outcome)) == 4 and set(names(outcome)) <= set(REASONS)


def test_a_clean_load_has_no_reason(outcome):
    assert names(outcome) == []


def test_a_client_that_works_all_the_time_bounds_the_load(outcome):
    outcome.client_cpu_s = 0.95
    assert load_figures.reasons(outcome, 1) == {
        "client-bound": "the client used 95% of a core; it may use 80%"
    }


def test_a_response_of_another_length_is_counted(outcome):
    outcome.answers[2].counts.pop()
    outcome.answers[2].times.pop()
    (text,) = load_figures.reasons(outcome, 1).values()
    assert text.startswith("1 of 4 responses; the first has 9 tokens, where 10 were asked for")


def test_a_prompt_that_was_cached_before_anybody_sent_it_is_a_hit(outcome):
    outcome.answers[2].cached = 15  # the first of its group, as a replayed prompt would be
    assert load_figures.reasons(outcome, 1) == {
        "cache hits": "1 of 2 prompts were in the cache before anybody had sent them "
        "(up to 15 tokens)"
    }


def test_what_prompts_have_in_common_by_their_serial_numbers_is_no_hit(outcome):
    outcome.answers[2].cached = 1
    assert names(outcome) == []


def test_an_engine_that_does_not_tell_its_hits_is_believed(outcome):
    for answer in outcome.answers:
        answer.cached = None
    assert names(outcome) == []


def test_a_failed_request_is_told_with_its_cause_and_not_as_a_wrong_length(outcome):
    outcome.answers[1].failure = "cut off"
    outcome.answers[1].counts[-1] = 9
    assert load_figures.reasons(outcome, 1) == {
        "failed requests": "1 of 4 requests; the first: cut off"
    }


@pytest.mark.parametrize("told_by", ["the engine's counter", "an answer"])
def test_a_preempted_request_is_a_reason(outcome, told_by):
    if told_by == "an answer":
        outcome.answers[3].preempted = 1
    else:
        outcome.looks[-1] = Look(preemptions=6)
    assert names(outcome) == ["preempted requests"]


def test_requests_that_wait_for_room_are_a_reason(outcome):
    outcome.looks = [Look(running=3, waiting=1) for i in range(4)]
    assert load_figures.reasons(outcome, 1) == {
        "requests waited": "1 while 3 ran; give the engine more cache (an embedded one: "
        "--cache-gb), or ask for less at once (--clients concurrency:N)"
    }


def test_requests_that_wait_for_their_turn_to_be_prefilled_do_not_wait_for_room(outcome):
    outcome.looks = [Look(running=i, waiting=8 - i) for i in range(8)]
    assert names(outcome) == []


@pytest.mark.parametrize(
    "seen",
    [
        [(0, 8)] * 8,
        [(3, 3), (0, 6), (0, 6), (0, 6), (0, 6)],  # some were still to be prefilled
        [(6, 0), (3, 3), (6, 0)] * 4,  # paused, or just on again, at every third look
    ],
)
def test_requests_that_wait_while_the_engine_publishes_do_not_wait_for_room(outcome, seen):
    outcome.looks = [
        Look(running=running, waiting=waiting) for i, (running, waiting) in enumerate(seen)
    ]
    assert names(outcome) == []


def test_samples_of_one_prompt_that_are_the_same_were_not_sampled(outcome):
    outcome.answers[1].ids = outcome.answers[0].ids[:9]  # it is shorter, and says the same
    assert load_figures.reasons(outcome, 1) == {"identical samples": "in 1 of 2 groups"}


def test_short_samples_may_be_alike_by_chance(outcome):
    outcome.answers[1].ids = outcome.answers[0].ids[:7]
    assert names(outcome) == []


def test_the_same_answer_to_two_prompts_is_no_identical_sample(outcome):
    outcome.answers[2].ids = outcome.answers[0].ids
    assert names(outcome) == []


def test_a_publication_that_failed_is_a_reason(outcome):
    outcome.unpublished = "engine-0 rejects version 2"
    assert load_figures.reasons(outcome, 1) == {"failed publication": "engine-0 rejects version 2"}
