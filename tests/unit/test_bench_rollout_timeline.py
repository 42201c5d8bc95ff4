"""Figures of a load, by hand: what an answer's moments make of makespan, tail and latencies."""

import pytest

from qurl_megatron.bench import load_figures
from qurl_megatron.bench.rollout_load import Ask, LoadOutcome, Look, Publication, TimedAnswer


def answer(began, times, ended=None, *, tokens=None, counts=None, prompt=3, failure=""):
    counts = counts or list(range(1, len(times) + 1))
    ask = Ask(0, (1,) * prompt, counts[-1] if tokens is None else tokens)
    return TimedAnswer(ask, began, list(times), counts, ended or times[-1], failure)


# Four at once; they end at 1, 2, 3 and 10.
BATCH = [answer(0.0, [0.5, 1.0]), answer(0.0, [2.0]), answer(0.0, [3.0]), answer(0.0, [4.0, 10.0])]


def test_the_tail_is_the_time_in_which_fewer_than_half_of_the_batch_run():
    # 4, 3, 2 until the third second, then one alone for 7 of 10.
    assert load_figures.makespan(BATCH) == 10.0
    assert load_figures.tail_share(BATCH) == pytest.approx(0.7)


def test_a_batch_that_ends_together_has_no_tail():
    assert load_figures.tail_share([answer(0.0, [2.0]), answer(0.0, [2.0])]) == 0.0


def test_the_time_in_which_a_batch_fills_up_is_no_tail():
    # The first runs alone for 4 seconds, both for one, the second alone for one: half is not few.
    assert load_figures.tail_share([answer(0.0, [5.0]), answer(4.0, [6.0])]) == 0.0


def test_a_failed_request_takes_time_and_makes_no_tokens():
    broken = answer(0.0, [1.0, 2.0], ended=20.0, failure="cut off")
    assert load_figures.makespan([*BATCH, broken]) == 20.0
    assert load_figures.tokens([*BATCH, broken]) == load_figures.tokens(BATCH) == 6
    assert load_figures.first_token([broken]) == load_figures.gaps([broken]) == []


def test_the_first_token_counts_from_when_its_request_was_due():
    assert load_figures.first_token([answer(2.0, [2.5, 3.0])]) == [0.5]


def test_tokens_that_come_together_share_their_gap():
    # 1 token at 1 s, 3 more at 4 s, 1 more at 6 s.
    assert load_figures.gaps([answer(0.0, [1.0, 4.0, 6.0], counts=[1, 4, 5])]) == [
        1.0,
        1.0,
        1.0,
        2.0,
    ]


def test_events_that_came_in_one_piece_came_together():
    one = answer(0.0, [1.0])
    one.came(2, at=3.0)
    one.came(3, at=3.00002)
    one.came(3, at=3.5)  # brings no token
    one.came(4, at=4.0)
    assert (one.times, one.counts) == ([1.0, 3.0, 4.0], [1, 3, 4])
    assert load_figures.gaps([one]) == [1.0, 1.0, 1.0]


def test_time_per_token_leaves_the_first_token_out():
    assert load_figures.per_token([answer(0.0, [9.0, 11.0, 12.0])]) == [1.5]
    assert load_figures.per_token([answer(0.0, [9.0])]) == []


def test_percentiles_of_nothing_are_none():
    assert load_figures.percentiles([]) == {}
    assert load_figures.percentiles(range(101)) == {50: 50, 90: 90, 99: 99}


def test_the_first_valid_token_after_a_publication_is_the_first_of_its_own_weights():
    publication = Publication("7@run", began=2.0, ended=3.0, paused_s=0.8)
    old, new, newer = (answer(0.0, [1.0, 4.0]) for _ in range(3))
    old.first_of = {"6@run": 1.0}
    new.first_of = {"6@run": 1.0, "7@run": 3.5}
    newer.first_of = {"7@run": 4.0}
    assert load_figures.first_valid(publication, [old, newer, new]) == 1.5
    assert load_figures.first_valid(publication, [old]) is None


def test_occupancy_is_none_where_the_engine_does_not_tell():
    assert load_figures.occupancy(LoadOutcome(looks=[Look(running=3)])) is None
    looks = [Look(occupancy=0.25), Look(), Look(occupancy=0.75)]
    assert load_figures.occupancy(LoadOutcome(looks=looks)) == (0.5, 0.75)


def test_preemptions_are_those_of_the_load_by_the_engines_counter_or_its_answers():
    looks = [Look(preemptions=40), Look(), Look(preemptions=43)]
    assert load_figures.preemptions(LoadOutcome(looks=looks)) == 3
    taken_back = answer(0.0, [1.0])
    taken_back.preempted = 2
    assert load_figures.preemptions(LoadOutcome(answers=[taken_back, *BATCH])) == 2


def test_what_a_publication_took_back_was_not_preempted():
    taken_back = answer(0.0, [1.0, 5.0])
    taken_back.preempted = 2
    outcome = LoadOutcome([taken_back], [Publication("7", 2.0, 3.0, 0.9)])
    assert load_figures.preemptions(outcome) == 1
    outcome.publications.append(Publication("8", 4.0, 4.5, 0.4))
    assert load_figures.preemptions(outcome) == 0
    outcome.publications[1] = Publication("8", 6.0, 7.0, 0.4)  # it had ended
    assert load_figures.preemptions(outcome) == 1
