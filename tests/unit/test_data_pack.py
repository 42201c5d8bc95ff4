"""Samples become tensors in which everything of a token sits where it is predicted."""

import pytest
import torch

from qurl_megatron.data.pack import pack_samples, pad_samples
from qurl_megatron.data.passes import plan_passes
from qurl_megatron.data.responses import Responses
from qurl_megatron.types import Prompt, Sample


def sample(prompt: list[int], response: list[int], log_probs: list[float]) -> Sample:
    return Sample(
        prompt=Prompt(0, tuple(prompt), "", ""),
        response_ids=tuple(response),
        behaviour_log_probs=tuple(log_probs),
        finish_reason="stop",
        versions=((0, len(response)),),
    )


SAMPLES = [
    sample([11, 12], [13, 14], [-0.5, -0.25]),
    sample([21], [22, 23, 24], [-1.0, -2.0, -3.0]),
    sample([31, 32, 33], [], []),
]
ALL, FIRST_TWO = Responses.of(SAMPLES), Responses.of(SAMPLES[:2])


def test_two_responses_by_hand():
    batch = pad_samples(FIRST_TWO, [0.5, 0.25], length=6, pad_id=9)
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 9, 9], [21, 22, 23, 24, 9, 9]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    # Position 1 of the first row predicts its first response token, 13.
    assert batch.targets.tolist() == [[12, 13, 14, 0, 0, 0], [22, 23, 24, 0, 0, 0]]
    assert batch.mask.tolist() == [[False, True, True] + [False] * 3, [True] * 3 + [False] * 3]
    assert batch.lengths == (2, 3) and batch.owners.tolist() == [0, 0, 1, 1, 1]
    assert batch.behaviour.tolist() == [-0.5, -0.25, -1, -2, -3]
    assert batch.weights.tolist() == [0.5, 0.5, 0.25, 0.25, 0.25]


def test_masked_targets_are_the_responses_in_order():
    batch = pad_samples(ALL, [1.0] * 3, length=8)
    assert batch.targets[batch.mask].tolist() == [t for s in SAMPLES for t in s.response_ids]
    assert len(batch.behaviour) == int(batch.mask.sum()) == sum(batch.lengths)


def test_more_padding_changes_nothing_but_the_padding():
    short, long = (pad_samples(ALL, [1.0] * 3, length=n) for n in (4, 16))
    for name in ("input_ids", "targets", "mask"):
        whole = getattr(long, name)
        torch.testing.assert_close(whole[:, :4], getattr(short, name))
        assert not whole[:, 4:].any()
    for name in ("owners", "behaviour", "weights"):
        torch.testing.assert_close(getattr(long, name), getattr(short, name))


def test_a_batch_of_empty_responses_has_nothing_to_learn_from():
    batch = pad_samples(Responses.of(SAMPLES[2:]), [1.0], length=4)
    assert not batch.mask.any() and len(batch.weights) == len(batch.behaviour) == 0


def test_a_sample_longer_than_the_batch_is_a_bug():
    with pytest.raises(AssertionError, match="4 tokens does not fit into 3"):
        pad_samples(FIRST_TWO, [0.0] * 2, length=3)


def test_packed_responses_by_hand():
    batch = pack_samples(ALL, [0.5, 0.25, 1.0], pad_id=9)
    assert batch.starts == (0, 4, 8, 11)
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 21, 22, 23, 24, 31, 32, 33]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2]]
    # The last token of a sequence predicts nothing, not the first one of the next.
    assert batch.targets.tolist() == [[12, 13, 14, 0, 22, 23, 24, 0, 32, 33, 0]]
    assert batch.targets[batch.mask].tolist() == [13, 14, 22, 23, 24]
    padded = pad_samples(ALL, [0.5, 0.25, 1.0], length=6)
    assert (batch.indices, batch.lengths) == (padded.indices, padded.lengths)
    for name in ("owners", "behaviour", "weights"):
        torch.testing.assert_close(getattr(batch, name), getattr(padded, name))


def test_packed_sequences_are_rounded_up_one_by_one_and_all_together():
    batch = pack_samples(ALL, [1.0] * 3, sequence_multiple=4, multiple=16, pad_id=9)
    assert batch.starts == (0, 4, 8, 16)
    assert batch.input_ids[0, 8:].tolist() == [31, 32, 33] + [9] * 5
    assert batch.positions[0, 8:].tolist() == list(range(8))
    assert batch.targets[batch.mask].tolist() == [13, 14, 22, 23, 24]


def test_sequences_of_like_length_share_a_pass():
    lengths = [100, 12, 90, 10, 11, 95, 9]
    # Three long ones take 300 of 320 positions; the short ones would cost 100 each there.
    assert plan_passes(lengths, 320, packed=False) == [[0, 2, 5], [1, 3, 4, 6]]
    # End to end, all but 7 tokens of the budget are used before a second pass begins.
    assert plan_passes(lengths, 320, packed=True) == [[0, 1, 2, 3, 4, 5], [6]]


def test_a_sequence_beyond_the_budget_has_a_pass_of_its_own():
    for packed in (False, True):
        assert plan_passes([3, 50, 4], 20, packed=packed) == [[1], [0, 2]]


def test_one_budget_for_all_is_one_pass_and_nothing_is_none():
    for packed in (False, True):
        assert [sorted(p) for p in plan_passes([5, 6, 7], 21, packed=packed)] == [[0, 1, 2]]
        assert plan_passes([], 21, packed=packed) == []


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seed", range(20))
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

    best = float("inf")
    for cuts in range(2 ** (len(lengths) - 1)):
        groups, group = [], [ordered[0]]
        for k, length in enumerate(ordered[1:]):
            if cuts >> k & 1:
                groups.append(group)
                group = []
            group.append(length)
        groups.append(group)
        if all(len(g) * max(g) <= budget for g in groups):
            best = min(best, cost(groups))
    passes = plan_passes(lengths, budget, packed=False)
    assert cost([[lengths[i] for i in p] for p in passes]) == best
