"""Who gets which responses: minibatches, data ranks and microbatches, of lengths alone."""

from itertools import chain, combinations, pairwise

import pytest
import torch

from qurl_megatron.data.dealing import deal, over_ranks, plan_passes, shuffled

LENGTHS = [7, 12, 5, 9, 14, 6, 11, 8, 13, 5, 10, 16, 4, 9, 15, 7]


@pytest.mark.parametrize("budget, packed", [(0, False), (30, False), (48, True)])
def test_minibatches_have_the_same_responses_in_every_layout(budget, packed):
    minibatches = shuffled(16, 2, seed=1)
    for ranks in (1, 2, 4):
        dealt = deal(minibatches, LENGTHS, ranks, 2, budget=budget, packed=packed)
        responses = [sorted(chain(*chain(*minibatch))) for minibatch in dealt]
        assert responses == list(map(sorted, minibatches))


def test_a_deal_by_hand():
    """Two ranks in turn, in the order of the minibatch; then so many to a microbatch."""
    assert deal([[5, 2, 7, 0]], [1] * 8, 2, 1) == [[[[5], [7]], [[2], [0]]]]
    assert deal([[5, 2, 7, 0]], [1] * 8, 2, 2) == [[[[5, 7]], [[2, 0]]]]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_minibatch_of_whole_groups_holds_all_responses_to_its_prompts(seed):
    minibatches = shuffled(512 * 16, 16, seed, group=16)
    assert [len({i // 16 for i in minibatch}) for minibatch in minibatches] == [32] * 16
    assert sorted(i for minibatch in minibatches for i in minibatch) == list(range(512 * 16))
    assert {len(minibatch) for minibatch in minibatches} == {512}


def test_data_ranks_get_like_loads_and_as_many_responses():
    lengths = [1, 2, 3, 4, 50, 60, 70, 100]
    shares = over_ranks(range(8), lengths, 2, evenly=True)
    # From the longest down, in turns: 100 | 70, 60 | 50, 4 | 3, 2 | 1.
    assert [[lengths[i] for i in share] for share in shares] == [[100, 50, 4, 1], [70, 60, 3, 2]]


def test_ranks_in_step_make_as_many_passes():
    lengths = [90, 90, 90, 90, 8, 8, 8, 8, 8, 8, 8, 8]
    minibatches = [list(range(12))]
    [free] = deal(minibatches, lengths, 3, 1, budget=100)
    [in_step] = deal(minibatches, lengths, 3, 1, budget=100, in_step=True)
    assert len({len(passes) for passes in free}) > 1
    assert {len(passes) for passes in in_step} == {max(map(len, free))}
    for passes, before in zip(in_step, free, strict=True):
        assert sorted(sum(passes, [])) == sorted(sum(before, [])) and all(passes)


def test_sequences_of_like_length_share_a_pass():
    lengths = [100, 12, 90, 10, 11, 95, 9]
    # Three long ones take 300 of 320 positions; the short ones would cost 100 each there.
    assert plan_passes(lengths, 320, packed=False) == [[0, 2, 5], [1, 3, 4, 6]]
    # End to end, all but 7 tokens of the budget are used before a second pass begins.
    assert plan_passes(lengths, 320, packed=True) == [[0, 1, 2, 3, 4, 5], [6]]


@pytest.mark.parametrize("packed", [False, True])
def test_plans_by_hand(packed):
    assert plan_passes([3, 50, 4], 20, packed=packed) == [[1], [0, 2]]  # one beyond the budget
    assert [sorted(p) for p in plan_passes([5, 6, 7], 21, packed=packed)] == [[0, 1, 2]]
    assert plan_passes([], 21, packed=packed) == []


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_passes_keep_the_budget_and_waste_little_of_it(packed, seed):
    generator = torch.Generator().manual_seed(seed)
    count, budget = 64 + 8 * seed, 4096
    # Response lengths spread over orders of magnitude; some are longer than the budget.
    lengths = (16 * (6 * torch.rand(count, generator=generator)).exp()).long().tolist()
    passes = plan_passes(lengths, budget, packed=packed)
    assert sorted(i for p in passes for i in p) == list(range(count))
    taken = [[lengths[i] for i in p] for p in passes]
    sizes = [sum(t) if packed else len(t) * max(t) for t in taken]
    assert all(size <= budget or len(t) == 1 for size, t in zip(sizes, taken, strict=True))
    assert sizes == sorted(sizes, reverse=True)
    padding = 1 - sum(lengths) / sum(sizes)
    assert padding == 0 if packed else padding < 0.12
    # What the passes have room for is at least two thirds full.
    assert sum(lengths) > 2 / 3 * sum(max(budget, size) for size in sizes[:-1])


def test_like_lengths_are_cut_as_cheaply_as_any_cut_of_the_sorted_lengths():
    lengths, budget = [3, 9, 4, 9, 2, 7, 3, 8], 20
    ordered = sorted(lengths)

    def cost(groups: list[list[int]]) -> float:
        return sum(len(g) * max(g) + budget / 8 for g in groups)

    costs = []
    for count in range(len(lengths)):
        for cuts in combinations(range(1, len(lengths)), count):
            ends = [0, *cuts, len(lengths)]
            groups = [ordered[a:b] for a, b in pairwise(ends)]
            if all(len(g) * max(g) <= budget for g in groups):
                costs.append(cost(groups))
    passes = plan_passes(lengths, budget, packed=False)
    assert cost([[lengths[i] for i in p] for p in passes]) == min(costs)
