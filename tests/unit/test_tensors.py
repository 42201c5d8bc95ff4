"""Parts of tensors: what two of them share, and its values."""

from itertools import product

import torch

from qurl_megatron.tensors.slice import Shard, Slice

WHOLE = Slice.whole((3, 4))


def boxes(length: int) -> list[range]:
    return [range(a, b) for a, b in product(range(length + 1), repeat=2) if a <= b]


def test_an_overlap_is_the_elements_that_both_have():
    parts = [
        Slice((rows.start, columns.start), (len(rows), len(columns)))
        for rows, columns in product(boxes(3), boxes(4))
    ]
    indices = torch.arange(12).view(3, 4)
    elements = {part: set(part.narrow(indices, WHOLE).flatten().tolist()) for part in parts}
    for one, other in product(parts, repeat=2):
        shared, expected = one.overlap(other), elements[one] & elements[other]
        assert (shared is not None) == bool(expected)
        if shared:
            assert elements[shared] == expected
            held = shared.narrow(one.narrow(indices, WHOLE), one)
            assert set(held.flatten().tolist()) == expected and shared.elements == len(expected)


def test_a_shard_is_cut_in_the_coordinates_of_the_whole():
    whole = torch.arange(24).view(6, 4)
    rows = Shard("w", whole[2:5], (6, 4), 0, 2)
    assert rows.part == Slice.along((6, 4), 0, 2, 5)
    cut = rows.cut(rows.part.overlap(Slice.along((6, 4), 0, 4, 6)))
    assert (cut.start, cut.value.tolist()) == (4, [[16, 17, 18, 19]])
    assert cut.value.data_ptr() == whole[4].data_ptr()  # a view
    columns = Shard("w", whole[:, 1:3], (6, 4), 1, 1)
    assert columns.cut(Slice.along((6, 4), 1, 2, 3)).value.tolist() == whole[:, 2:3].tolist()
    norm = Shard.whole("n", whole[0])
    again = norm.cut(Slice.whole((4,)))
    assert again.value.data_ptr() == whole.data_ptr() and (again.dim, again.start) == (None, 0)
