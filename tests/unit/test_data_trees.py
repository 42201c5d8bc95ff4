"""Responses to one prompt lie behind one copy of it, and loads are counted so."""

import pytest
import torch

from qurl_megatron.data.pack import pack_samples, plant_samples
from qurl_megatron.data.responses import Responses
from qurl_megatron.data.trees import Tree, count_off, families, fill, spread, tree_of
from qurl_megatron.types import Prompt, Sample


def sample(prompt: tuple[int, ...], response: tuple[int, ...]) -> Sample:
    log_probs = tuple(-0.5 * (i + 1) for i in range(len(response)))
    versions = ((0, len(response)),)
    # The prompt is made anew for each: equal tokens make one prompt, not one object.
    return Sample(Prompt(0, prompt, "", ""), response, log_probs, "stop", versions)


ALL = Responses.of(
    [
        sample((11, 12, 13), (1, 2)),
        sample((21,), (3, 4, 5)),
        sample((11, 12, 13), (6,)),
        sample((31, 32), (7, 8)),
        sample((11, 12, 13), ()),
    ]
)


def test_two_families_by_hand():
    batch = plant_samples(ALL, [0.5, 0.25, 1.0], [[0, 2], [3]], multiple=4, pad_id=9)
    # The prefix, then each response behind the prompt's last token and without its own last.
    assert batch.trees == (Tree(0, 2, (2, 1)), Tree(5, 0, (3,)))
    assert batch.input_ids.tolist() == [[11, 12, 13, 1, 13, 31, 32, 7]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 2, 0, 1, 2]]
    assert batch.targets.tolist() == [[12, 13, 1, 2, 6, 32, 7, 8]]
    assert batch.mask.tolist() == [[False, False, True, True, True, False, True, True]]
    assert batch.indices == (0, 2, 3) and batch.lengths == (2, 1, 2)
    assert batch.owners.tolist() == [0, 0, 1, 2, 2]
    assert batch.behaviour.tolist() == [-0.5, -1.0, -0.5, -0.5, -1.0]
    assert batch.weights.tolist() == [0.5, 0.5, 0.25, 1.0, 1.0]


def test_what_the_loss_reads_is_that_of_the_unshared_row():
    whole = [[0, 2, 4], [1], [3]]
    shared = plant_samples(ALL, [1.0] * 5, whole)
    plain = pack_samples(ALL, [1.0] * 5, indices=[0, 2, 4, 1, 3])
    assert shared.targets[shared.mask].tolist() == plain.targets[plain.mask].tolist()
    assert shared.positions[shared.mask].tolist() == plain.positions[plain.mask].tolist()
    for name in ("owners", "behaviour", "weights"):
        torch.testing.assert_close(getattr(shared, name), getattr(plain, name))


def test_padding_of_a_row_is_of_no_tree_and_no_response():
    batch = plant_samples(ALL, [1.0], [[1]], multiple=8, pad_id=9)
    assert batch.input_ids.tolist() == [[21, 3, 4, 9, 9, 9, 9, 9]]
    assert batch.trees[-1].stop == 3 and int(batch.mask.sum()) == 3


def test_an_empty_response_has_a_position_and_nothing_to_learn_from():
    batch = plant_samples(ALL, [1.0, 1.0], [[4, 0]])
    assert batch.trees == (Tree(0, 2, (1, 2)),)
    assert batch.input_ids.tolist() == [[11, 12, 13, 13, 1]]
    assert batch.mask.tolist() == [[False, False, False, True, True]]


def test_a_prompt_counts_once():
    # 512 tokens of a prompt and 8 x 64 of responses: 1,023 positions where there were 4,608.
    assert tree_of(512, [64] * 8).stop == 511 + 8 * 64
    assert tree_of(512, [64]).stop == 512 + 64 - 1


def test_equal_prompts_are_one_family_wherever_they_are():
    assert families([4, 1, 2, 0, 3], ALL.summary.prompts) == [[4, 2, 0], [1], [3]]


def test_hands_are_balanced_by_what_shared_prompts_leave():
    def cost(family):
        return tree_of(101, [1] * len(family)).stop

    # Eight responses to one prompt take 108 positions, not 816; one each to four takes 404.
    eight = [0, 1, 2, 3, 4, 5, 6, 7]
    dealt = spread([[8], [9], eight, [11]], 2, cost)
    assert dealt == [[eight, [11]], [[8], [9]]]


def test_a_family_is_cut_only_where_the_busiest_hand_gains():
    def cost(family):
        return tree_of(11, [10] * len(family)).stop

    eight, other = [0, 1, 2, 3, 4, 5, 6, 7], [10, 11, 12, 13, 14, 15, 16, 17]
    # 90 and 90: a cut adds 10 to one of them.
    assert spread([eight, other], 2, cost) == [[eight], [other]]
    # 90 and 20; cut, it is 70 and 50.
    assert spread([eight, [10]], 2, cost) == [[[0, 1, 2, 3], [10]], [[4, 5, 6, 7]]]


def test_families_are_cut_further_where_the_first_cut_gains_nothing():
    def cost(family):
        return tree_of(11, [10] * len(family)).stop

    # Whole, 340, 340, 170 and 170: one cut leaves another hand as busy as before.
    whole = [list(range(n, n + 16)) for n in range(0, 96, 16)]
    dealt = spread(whole, 4, cost)
    assert [sum(map(cost, hand)) for hand in dealt] == [260] * 4
    # 90 and 50, then 100 and 50, then 80 and 80.
    dealt = spread([whole[0][:8], whole[1][:4]], 2, cost)
    assert [sum(map(cost, hand)) for hand in dealt] == [80, 80]


@pytest.mark.parametrize("hands", [1, 2, 3, 6])
def test_every_hand_gets_something_and_every_response_is_dealt_once(hands):
    dealt = spread([[0, 1, 2, 3, 4, 5]], hands, len)
    assert sorted(i for hand in dealt for part in hand for i in part) == list(range(6))
    assert all(dealt) and len(dealt) == hands


@pytest.mark.parametrize("seed", range(5))
def test_passes_keep_the_budget_and_cut_what_does_not_fit(seed):
    generator = torch.Generator().manual_seed(seed)
    count = 60
    prompt = torch.randint(1, 200, (10,), generator=generator).tolist()
    length = torch.randint(0, 400, (count,), generator=generator).tolist()

    def cost(family):
        return tree_of(prompt[family[0] % 10], [length[i] for i in family]).stop

    whole = families(range(count), [i % 10 for i in range(count)])
    passes = fill(whole, 500, cost)
    assert sorted(i for p in passes for part in p for i in part) == list(range(count))
    for parts in passes:
        assert sum(map(cost, parts)) <= 500 or [len(part) for part in parts] == [1]
    assert fill(whole, 10**6, cost) == [sorted(whole)]


def test_passes_of_so_many_responses_cut_a_family_at_their_ends():
    assert count_off([[0, 1, 2], [3], [4, 5, 6]], 4) == [[[0, 1, 2], [3]], [[4, 5, 6]]]
    assert count_off([[0, 1, 2], [3, 4]], 2) == [[[0, 1]], [[2], [3]], [[4]]]
