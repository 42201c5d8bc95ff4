"""Runs of a tensor's elements as boxes of it."""

import itertools
import math

import pytest
import torch

from qurl_megatron.tensors.slice import Slice
from qurl_megatron.training.in_place import boxes


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (2, 1, 3, 2)])
def test_every_run_is_the_elements_of_its_boxes_in_order(shape):
    whole = torch.arange(math.prod(shape)).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
        found = boxes(shape, start, stop)
        cut = [box.narrow(whole, Slice.whole(shape)).flatten() for box in found]
        elements = torch.cat(cut).tolist() if cut else []
        assert elements == list(range(start, stop))
        assert len(found) <= 2 * len(shape) - 1


def test_whole_rows_are_one_box():
    assert boxes((8, 4), 4, 28) == [Slice((1, 0), (6, 4))]
    assert boxes((2, 3, 4), 0, 24) == [Slice.whole((2, 3, 4))]
