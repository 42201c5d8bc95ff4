"""Attention over prompts that are there once equals the dense one that masks all else."""

import pytest
import torch
from torch import Tensor

from qurl_megatron.data.trees import Tree, tree_of
from qurl_megatron.model.tree_attention import tree_attention

SCALE, HEAD = 0.3, 8
FORESTS = {
    "like and unlike prompts": [(5, [3, 1, 4]), (1, [2, 2]), (5, [1, 1, 1]), (33, [20, 1])],
    "responses of one token": [(4, [1, 1, 1, 1])],
    "each response has its prompt": [(7, [3]), (2, [9]), (1, [1])],
    "prompts of one token": [(1, [3, 4]), (1, [1, 1])],
    "a group in two pieces": [(9, [3, 4]), (9, [30, 1])],
}
PADDING = 3


def planted(families: list[tuple[int, list[int]]]) -> tuple[tuple[Tree, ...], int]:
    """The trees of (prompt, responses) end to end, and the length of their row."""
    trees: list[Tree] = []
    for prompt, responses in families:
        trees.append(tree_of(prompt, responses, trees[-1].stop if trees else 0))
    return tuple(trees), trees[-1].stop + PADDING


def visible(trees: tuple[Tree, ...], size: int) -> Tensor:
    """[query, key] bool: of one branch, or of the prefix before it, and not later."""
    branch_S, tree_S = torch.full([size], -1), torch.full([size], -1)
    for number, tree in enumerate(trees):
        tree_S[tree.start : tree.stop] = number
        at = tree.start + tree.prefix
        for branch, count in enumerate(tree.branches):
            branch_S[at : at + count] = branch
            at += count
    seen = (branch_S[:, None] == branch_S) | (branch_S == -1)
    return (seen & (tree_S[:, None] == tree_S) & (tree_S != -1)).tril()


def dense(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    # The padding of a row sees nothing.
    weights = scores.masked_fill(~seen, -1e9).softmax(-1) * seen.any(1)[:, None]
    return torch.einsum("hqk,khd->qhd", weights, value)


def both(families, heads: int, groups: int, dtype: torch.dtype) -> tuple[list[Tensor], ...]:
    """Output and gradients of query, key and value: of the trees, and of the dense reference."""
    trees, size = planted(families)
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> Tensor:
        # Values that the narrow type has: the reference shall read the same ones.
        x = torch.randn(size, count, HEAD, generator=generator, dtype=torch.float64)
        return x.to(dtype).double()

    inputs, upstream = [draw(heads), draw(groups), draw(groups)], draw(heads)
    seen = visible(trees, size)
    found = []
    for kind, attend in (
        (dtype, lambda *x: tree_attention(*x, trees, SCALE)),
        (torch.float64, lambda *x: dense(*x, seen)),
    ):
        leaves = [x.to(kind, copy=True).requires_grad_() for x in inputs]
        out = attend(*leaves)
        # Nobody reads what padding gives, but its gradient must do no harm.
        out.backward(upstream.to(kind))
        found.append([out.detach(), *(x.grad for x in leaves)])
    return found[0], found[1]


@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("name", FORESTS)
def test_results_and_gradients_equal_the_dense_ones_in_float64(name, heads, groups):
    actual, expected = both(FORESTS[name], heads, groups, torch.float64)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_bf16_rounds_as_much_as_bf16_does():
    actual, expected = both(FORESTS["like and unlike prompts"], 4, 2, torch.bfloat16)
    for one, other in zip(actual, expected, strict=True):
        error = (one.double() - other).norm() / other.norm()
        assert error < 2**-8


def test_padding_gets_zeros_and_finite_gradients():
    actual, _ = both(FORESTS["responses of one token"], 4, 2, torch.float32)
    assert not actual[0][-PADDING:].any()
    assert all(part.isfinite().all() for part in actual)


def test_padding_of_unlike_responses_is_harmless_however_large_scores_are():
    trees, size = planted([(5, [9, 1, 4]), (5, [2, 2])])
    generator = torch.Generator().manual_seed(0)
    leaves = [100 * torch.randn(size, 1, HEAD, generator=generator) for _ in range(3)]
    leaves = [x.requires_grad_() for x in leaves]
    tree_attention(*leaves, trees, SCALE).sum().backward()
    assert all(x.grad.isfinite().all() for x in leaves)


def test_a_row_has_the_same_bits_twice():
    first, second = (both(FORESTS["a group in two pieces"], 4, 2, torch.float32) for _ in "12")
    assert all(map(torch.equal, first[0], second[0]))


def test_scores_as_large_as_a_float_holds_well_leave_the_merge_exact():
    trees, size = planted([(5, [4, 3])])
    query, key, value = (torch.full((size, 1, HEAD), x) for x in (30.0, 30.0, 1.0))
    # exp(30 * 30 * 8 * 0.3) is more than any float; every weight is still a share of 1.
    out = tree_attention(query, key, value, trees, SCALE)
    torch.testing.assert_close(out[: trees[-1].stop], torch.ones(trees[-1].stop, 1, HEAD))
