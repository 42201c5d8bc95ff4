"""Groups that teach nothing are replaced, round by round; rounds and shares worked by hand."""

import threading

import pytest

from qurl_megatron.fleet.client import EngineError
from qurl_megatron.observe.metrics import values
from qurl_megatron.training.ahead import Ahead
from qurl_megatron.training.groups import Draft, fill, useful
from qurl_megatron.types import Prompt, Sample
from tests.support.waiting import PATIENCE_S

MIXED, RIGHT, WRONG = (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)


def group(index: int, rewards=MIXED) -> list[Sample]:
    prompt = Prompt(index, (1,), "", "")
    return [Sample(prompt, (2, 3), (-1.0, -1.0), "stop", ((0, 2),), reward=r) for r in rewards]


class Prompts:
    """An endless stream; what is answered to prompt i is ``rewards[i]``, and mixed beyond them."""

    def __init__(self, *rewards):
        self.rewards = rewards
        self.next = 0
        self.rounds: list[list[int]] = []  # prompts of each round that was asked for
        self.lock = threading.Lock()

    def draw(self, count: int) -> list[Prompt]:
        with self.lock:
            first, self.next = self.next, self.next + count
        return [Prompt(i, (1,), "", "") for i in range(first, first + count)]

    def answer(self, prompts) -> list[Sample]:
        self.rounds.append([prompt.index for prompt in prompts])
        known = dict(enumerate(self.rewards))
        return [s for p in prompts for s in group(p.index, known.get(p.index, MIXED))]

    def draft(self, wanted: int, max_refills: int | None = 10) -> Draft:
        return Draft(self.draw(wanted), wanted, max_refills)


def indices(draft: Draft) -> list[int]:
    return [one[0].prompt.index for one in draft.chosen()]


def test_rounds_draw_what_is_missing_over_the_share_that_was_kept():
    prompts = Prompts(MIXED, RIGHT, WRONG, WRONG, MIXED, WRONG, RIGHT)
    draft = fill(prompts.draft(4), prompts.answer, prompts.draw)
    # 1 of 4 kept: 3 missing / 0.25 = 12, at most 4. Then 3 of 8: 1 / 0.375 = 2.67.
    assert prompts.rounds == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert indices(draft) == [0, 4, 7, 8]
    assert all(map(useful, draft.chosen()))
    assert values(draft.metrics()) == pytest.approx(
        {
            # 6 mixed groups of 2 answers, 2 all right ones: (6 + 4) of 22 answers.
            "reward/mean_generated": 10 / 22,
            "sampling/kept_fraction": 6 / 11,
            "sampling/all_right_fraction": 2 / 11,
            "sampling/all_wrong_fraction": 3 / 11,
            "sampling/refills": 2,
            "sampling/surplus": 2,
            "sampling/unfilled": 0,
        }
    )
    assert draft.generated_tokens == 11 * 2 * 2


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ([MIXED] * 8, 0),
        ([MIXED] * 6 + [WRONG] * 2, 3),  # 2 / (6/8) = 2.67
        ([MIXED] * 4 + [RIGHT] * 4, 8),  # 4 / (1/2)
        ([MIXED] * 7 + [RIGHT], 2),  # 1 / (7/8) = 1.14
        ([WRONG] * 8, 8),  # 8 / 0.25 = 32, at most 8
        ([MIXED] * 6 + [WRONG] * 34, 8),  # 2 / 0.25, not 2 / 0.15
    ],
)
def test_the_size_of_the_next_round(first, expected):
    draft = Draft([Prompt(i, (1,), "", "") for i in range(len(first))], 8, 10)
    assert draft.take([s for i, rewards in enumerate(first) for s in group(i, rewards)]) == expected


def test_when_the_rounds_are_used_up_dropped_groups_fill_up_the_batch_in_order():
    prompts = Prompts(WRONG, MIXED, *[RIGHT] * 100)
    draft = fill(prompts.draft(4, max_refills=2), prompts.answer, prompts.draw)
    assert len(prompts.rounds) == 3 and draft.unfilled == 3
    assert indices(draft) == [0, 1, 2, 3]
    assert [useful(one) for one in draft.chosen()] == [False, True, False, False]
    assert values(draft.metrics())["sampling/unfilled"] == 3


def test_without_dynamic_sampling_groups_are_taken_as_they_come():
    prompts = Prompts(*[WRONG] * 4)
    draft = fill(prompts.draft(4, max_refills=None), prompts.answer, prompts.draw)
    assert indices(draft) == [0, 1, 2, 3] and len(prompts.rounds) == 1
    assert (draft.metrics(), draft.unfilled) == ({}, 0)


def test_after_a_failure_only_the_last_round_is_asked_again():
    prompts = Prompts(MIXED, WRONG)
    calls = []

    def answer(asked):
        calls.append([prompt.index for prompt in asked])
        if len(calls) == 2:
            raise EngineError("no engine is left")
        return prompts.answer(asked)

    draft = prompts.draft(2)
    with pytest.raises(EngineError):
        fill(draft, answer, prompts.draw)
    fill(draft, answer, prompts.draw)
    assert calls == [[0, 1], [2, 3], [2, 3]]
    assert indices(draft) == [0, 2]


def steps(prompts: Prompts, staleness: int, *, first: int = 1, last: int = 4, produce=None):
    """An ``Ahead`` over the stream, two groups a step."""

    def draw():
        return {"next": prompts.next}, prompts.draft(2)

    def answered(step, draft, stop):
        return fill(draft, prompts.answer, prompts.draw)

    return Ahead(
        draw,
        produce or answered,
        lambda: {"next": prompts.next},
        first=first,
        last=last,
        max_staleness=staleness,
    )


REWARDS = [MIXED, WRONG, MIXED, MIXED, RIGHT, WRONG, WRONG, RIGHT, MIXED, MIXED, MIXED, WRONG]


def test_without_staleness_a_run_goes_on_from_any_cursor_as_if_never_interrupted():
    def train(prompts, first):
        taken = []
        with steps(prompts, 0, first=first) as batches:
            for step in range(first, 5):
                batches.admit(step - 1)
                draft, cursor = batches.take(step, lambda: False)
                taken.append((indices(draft), cursor))
        return taken

    whole = train(Prompts(*REWARDS), 1)
    # 1 of 2 kept: 1 missing / 0.5 = 2 more prompts, of which the first is enough.
    assert whole[0] == ([0, 2], {"next": 4})
    for done in (1, 2, 3):
        again = Prompts(*REWARDS)
        again.next = whole[done - 1][1]["next"]
        assert train(again, done + 1) == whole[done:]


def test_ahead_of_training_the_cursor_skips_nothing_that_was_not_trained_on():
    prompts = Prompts(WRONG, WRONG)
    second_drawn = threading.Event()

    def produce(step, draft, stop):
        second_drawn.wait(PATIENCE_S)  # step 2 draws before step 1 draws again
        return fill(draft, prompts.answer, prompts.draw)

    with steps(prompts, 1, produce=produce) as batches:
        batches.admit(0)
        second_drawn.set()
        draft, cursor = batches.take(1, lambda: False)
        # Step 2 has 2 and 3, so step 1 went on behind them: 4 and 5 come again after a restart.
        assert indices(draft) == [4, 5] and cursor == {"next": 2}
        batches.admit(1)
        draft, cursor = batches.take(2, lambda: False)
        assert indices(draft) == [2, 3] and cursor == {"next": 6}
