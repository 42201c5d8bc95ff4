"""The critic's clipped loss."""

import pytest
import torch

from qurl_megatron.algo.advantages import value_loss


def evaluate(values, before, returns, clip):
    values = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    others = (torch.tensor(x, dtype=torch.float64) for x in (before, returns))
    loss, clipped = value_loss(values, *others, clip=clip)
    loss.sum().backward()
    return loss.tolist(), clipped.tolist(), values.grad.tolist()


def test_clipped_value_loss_by_hand():
    # Before 0, clip 0.2. A step of 0.1 towards 1 is free: 0.9^2 / 2. One of 0.5 counts as 0.2:
    # 0.8^2 / 2, no gradient. One of 0.5 away from -1 counts in full: 1.5^2 / 2.
    loss, clipped, gradient = evaluate([0.1, 0.5, 0.5], [0.0] * 3, [1.0, 1.0, -1.0], clip=0.2)
    assert loss == pytest.approx([0.405, 0.32, 1.125])
    assert clipped == [False, True, False]
    assert gradient == pytest.approx([-0.9, 0.0, 1.5])


def test_past_its_return_a_value_is_called_back():
    # From 0 to 3 past the return 1: (3 - 1)^2 is more than (0.2 - 1)^2.
    loss, clipped, gradient = evaluate([3.0], [0.0], [1.0], clip=0.2)
    assert (loss, clipped, gradient) == ([2.0], [False], [2.0])


def test_without_clip_it_is_half_the_squared_error():
    loss, clipped, gradient = evaluate([0.5, -2.0], [0.0, 0.0], [1.0, 1.0], clip=0.0)
    assert loss == [0.125, 4.5] and clipped == [False, False] and gradient == [-0.5, -3.0]


def test_it_is_the_larger_of_both_losses_everywhere():
    generator = torch.Generator().manual_seed(0)
    values, before, returns = torch.randn(3, 1000, generator=generator, dtype=torch.float64)
    values.requires_grad_()
    loss, clipped = value_loss(values, before, returns, clip=0.3)
    bounded = torch.maximum(torch.minimum(values, before + 0.3), before - 0.3)
    expected = torch.maximum((values - returns) ** 2, (bounded - returns) ** 2) / 2
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert torch.equal(gradient == 0, clipped) and 0.1 < clipped.double().mean() < 0.9


def test_only_the_current_value_is_differentiated():
    values, before, returns = (torch.randn(5, requires_grad=True) for _ in range(3))
    value_loss(values, before, returns, clip=0.1)[0].sum().backward()
    assert values.grad is not None and before.grad is None and returns.grad is None
