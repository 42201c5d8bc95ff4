"""KL estimators, group advantages, and the weights of the average."""

import math

import pytest
import torch

from qurl_megatron.algo.advantages import ADVANTAGES, group_advantages
from qurl_megatron.algo.aggregate import AGGREGATIONS, token_weights
from qurl_megatron.algo.kl import ESTIMATORS, k1, k2, k3


def test_k3_is_never_negative_and_exact_for_tiny_differences():
    gap = torch.tensor([1e-6, -1e-6, 1e-4, -3e-3])
    base = torch.zeros(4)
    torch.testing.assert_close(k3(base, gap), gap**2 / 2, rtol=2e-2, atol=1e-13)
    assert (k3(torch.zeros(61), torch.linspace(-30, 30, 61)) >= 0).all()


def test_gradient_of_each_estimator_as_a_loss():
    """Expected over the current policy: nothing, KL(current || reference), and the reverse."""
    logits = torch.tensor([0.3, -1.0, 1.2], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    p = logits.log_softmax(0)

    def gradient(loss):
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    def expected(estimate):
        return gradient((p.detach().exp() * estimate(p, reference)).sum())

    torch.testing.assert_close(expected(k1), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(expected(k2), gradient((p.exp() * (p - reference)).sum()))
    backwards = (reference.exp() * (reference - p)).sum()
    torch.testing.assert_close(expected(k3), gradient(backwards))


@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_kl_estimators_stay_finite(gap):
    current = torch.zeros(1, requires_grad=True)
    for estimate in ESTIMATORS.values():
        value = estimate(current, torch.tensor([gap]))
        value.backward()
        assert value.isfinite().all() and current.grad.isfinite().all()


def test_grpo_advantages_by_hand():
    # mean 0.5, sample deviation sqrt(1 / 3)
    advantages = group_advantages(torch.tensor([[0.0, 1.0, 0.0, 1.0]]))
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, 1.0, -1.0, 1.0]]) * expected)


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
def test_a_group_without_spread_gives_exactly_zero(kind):
    rewards = torch.tensor([[0.1, 0.1, 0.1], [0.3, 0.3, 0.1]])
    advantages = group_advantages(rewards, kind)
    assert (advantages[0] == 0).all() and (advantages[1] != 0).all()
    assert group_advantages(torch.tensor([[0.7], [0.2]]), kind).tolist() == [[0.0], [0.0]]
    assert group_advantages(torch.empty(0, 4), kind).shape == (0, 4)


def test_groups_do_not_see_each_other():
    rewards = torch.rand(5, 4, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([group_advantages(row[None]) for row in rewards])
    torch.testing.assert_close(group_advantages(rewards), alone, rtol=0, atol=0)


@pytest.mark.parametrize("kind", sorted(AGGREGATIONS))
def test_empty_responses_change_nothing_and_none_at_all_is_zero(kind):
    padded = token_weights([3, 0, 7, 0], kind, constant=16)
    alone = token_weights([3, 7], kind, constant=16)
    torch.testing.assert_close(padded[[0, 2]], alone, rtol=0, atol=0)
    assert token_weights([0, 0], kind, constant=16).tolist() == [0, 0]
    assert token_weights([], kind, constant=16).shape == (0,)
