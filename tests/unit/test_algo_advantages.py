"""Advantages per token: rewards at the end, returns, GAE, whitening; and the critic's loss."""

import math

import pytest
import torch

from qurl_megatron.algo.advantages import (
    at_last_token,
    discounted_returns,
    gae,
    value_loss,
    whitened,
)

LENGTHS = (3, 0, 5, 1, 0, 9, 2)


def random_tokens(seed, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), generator=generator, dtype=torch.float64)


def test_a_reward_is_at_the_last_token_of_its_response():
    rewards = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert at_last_token(rewards, [2, 0, 1, 3]).tolist() == [0, 1, 3, 0, 0, 4]
    assert at_last_token(rewards[:2], [0, 0]).shape == (0,)
    assert at_last_token(rewards[:0], []).shape == (0,)


def test_discounted_returns_by_hand():
    # 1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4, 4 | 8
    returns = discounted_returns(torch.tensor([1.0, 2, 4, 8]), [3, 1], gamma=0.5)
    assert returns.tolist() == [3.0, 4.0, 4.0, 8.0]


def naive_gae(rewards, values, lengths, gamma, lam):
    advantages, start = [], 0
    for length in lengths:
        last, following, backwards = 0.0, 0.0, []
        for t in reversed(range(start, start + length)):
            error = rewards[t] + gamma * following - values[t]
            last = error + gamma * lam * last
            backwards.append(last)
            following = values[t]
        advantages += reversed(backwards)
        start += length
    return advantages


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.0, 1.0)])
def test_gae_equals_a_loop_over_tokens(gamma, lam):
    rewards, values = random_tokens(0), random_tokens(1)
    expected = naive_gae(rewards.tolist(), values.tolist(), LENGTHS, gamma, lam)
    advantages, returns = gae(rewards, values, LENGTHS, gamma=gamma, lam=lam)
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(returns, advantages + values)


def test_gae_of_empty_responses():
    nothing = torch.zeros(0)
    advantages, returns = gae(nothing, nothing, [0, 0], gamma=1.0, lam=1.0)
    assert advantages.shape == returns.shape == (0,)


def test_advantages_are_not_differentiated():
    values = random_tokens(1).requires_grad_()
    advantages, returns = gae(random_tokens(0), values, LENGTHS, gamma=1.0, lam=0.9)
    assert not (advantages.requires_grad or returns.requires_grad)
    assert not whitened(values).requires_grad


def test_whitening_one_value_none_and_equal_ones_gives_zeros():
    assert whitened(torch.tensor([5.0])).tolist() == [0.0]
    assert whitened(torch.tensor([])).shape == (0,)
    assert whitened(torch.full((7,), 0.1)).abs().max() < 1e-9


@pytest.mark.parametrize("clip", [0.3, 0.0])
def test_a_value_pays_the_larger_of_both_losses_and_without_clip_its_squared_error(clip):
    generator = torch.Generator().manual_seed(0)
    values, before, returns = torch.randn(3, 1000, generator=generator, dtype=torch.float64)
    values.requires_grad_()
    loss, clipped = value_loss(values, before, returns, clip=clip)
    reach = clip or math.inf
    bounded = torch.maximum(torch.minimum(values, before + reach), before - reach)
    expected = torch.maximum((values - returns) ** 2, (bounded - returns) ** 2) / 2
    torch.testing.assert_close(loss, expected)
    gradient, expected_gradient = (
        torch.autograd.grad(total.sum(), values)[0] for total in (loss, expected)
    )
    torch.testing.assert_close(gradient, expected_gradient)
    assert torch.equal(gradient == 0, clipped)
    assert (0.1 < clipped.double().mean() < 0.9) == bool(clip)


def test_only_the_current_value_is_differentiated():
    values, before, returns = (torch.randn(5, requires_grad=True) for _ in range(3))
    value_loss(values, before, returns, clip=0.1)[0].sum().backward()
    assert values.grad is not None and before.grad is None and returns.grad is None
