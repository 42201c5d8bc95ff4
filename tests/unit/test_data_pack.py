"""Samples become tensors in which everything of a token sits where it is predicted."""

import pytest
import torch

from qurl_megatron.data.pack import pack_samples, pad_samples
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
    batch = pad_samples(FIRST_TWO, [0, 1], [0.5, 0.25], length=6)
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 0, 0], [21, 22, 23, 24, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    # Position 1 of the first row predicts its first response token, 13.
    assert batch.targets.tolist() == [[12, 13, 14, 0, 0, 0], [22, 23, 24, 0, 0, 0]]
    assert batch.mask.tolist() == [[False, True, True] + [False] * 3, [True] * 3 + [False] * 3]
    assert batch.lengths == (2, 3) and batch.owners.tolist() == [0, 0, 1, 1, 1]
    assert batch.behaviour.tolist() == [-0.5, -0.25, -1, -2, -3]
    assert batch.weights.tolist() == [0.5, 0.5, 0.25, 0.25, 0.25]


def test_more_padding_changes_nothing_but_the_padding():
    short, long = (pad_samples(ALL, range(3), [1.0] * 3, length=n) for n in (4, 16))
    for name in ("input_ids", "targets", "mask"):
        whole = getattr(long, name)
        torch.testing.assert_close(whole[:, :4], getattr(short, name))
        assert not whole[:, 4:].any()
    for name in ("owners", "behaviour", "weights"):
        torch.testing.assert_close(getattr(long, name), getattr(short, name))


def test_a_sample_longer_than_the_batch_is_a_bug():
    with pytest.raises(AssertionError, match="4 tokens does not fit into 3"):
        pad_samples(FIRST_TWO, [0, 1], [0.0] * 2, length=3)


def test_packed_responses_by_hand():
    batch = pack_samples(ALL, range(3), [0.5, 0.25, 1.0])
    assert batch.starts == (0, 4, 8, 11)
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 21, 22, 23, 24, 31, 32, 33]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2]]
    # The last token of a sequence predicts nothing, not the first one of the next.
    assert batch.targets.tolist() == [[12, 13, 14, 0, 22, 23, 24, 0, 32, 33, 0]]
    assert batch.targets[batch.mask].tolist() == [13, 14, 22, 23, 24]
    padded = pad_samples(ALL, range(3), [0.5, 0.25, 1.0], length=6)
    assert (batch.indices, batch.lengths) == (padded.indices, padded.lengths)
    for name in ("owners", "behaviour", "weights"):
        torch.testing.assert_close(getattr(batch, name), getattr(padded, name))


def test_packed_sequences_are_rounded_up_one_by_one_and_all_together():
    batch = pack_samples(ALL, range(3), [1.0] * 3, sequence_multiple=4, multiple=16)
    assert batch.starts == (0, 4, 8, 16)
    assert batch.input_ids[0, 8:].tolist() == [31, 32, 33] + [0] * 5
    assert batch.positions[0, 8:].tolist() == list(range(8))
    assert batch.targets[batch.mask].tolist() == [13, 14, 22, 23, 24]
