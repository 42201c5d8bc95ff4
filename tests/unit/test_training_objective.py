"""The loss of a microbatch, term by term, for log-probs that are given instead of computed."""

import math

import pytest
import torch

from qurl_megatron.config import AlgoConfig
from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.training.objective import PolicyLoss


def batch(reference, *, behaviour=None, proximal=None, advantages=None):
    """One response; its tokens weigh 1 each, so that the loss is the sum over them."""
    n = len(reference)
    zero, ids = torch.zeros(n), torch.zeros(1, n, dtype=torch.int64)
    return TokenBatch(
        *(ids, ids, ids, ids == 0, (0,), (n,), torch.zeros(n, dtype=torch.int64)),
        behaviour=zero if behaviour is None else behaviour,
        weights=torch.ones(n),
        proximal=zero if proximal is None else proximal,
        reference=torch.tensor(reference),
        advantages=zero if advantages is None else advantages,
    )


def loss_and_gradient(current, tokens, **settings):
    """Of the loss in the current log-probs; ``settings`` are of [algo]."""
    leaf = torch.tensor(current, requires_grad=True)
    loss = PolicyLoss(lambda logits, _: (logits, torch.zeros(len(current))), AlgoConfig(**settings))
    total, metrics = loss(leaf, tokens)
    total.backward()
    return total.item(), leaf.grad.tolist(), metrics


def test_k3_of_a_token_ends_at_ten_and_with_it_its_gradient():
    # log(reference / current) = 2 and 10: k3 = e^2 - 3 and e^10 - 11 = 22015; gradient 1 - e^2.
    tokens = batch([2.0, 10.0])
    loss, gradient, metrics = loss_and_gradient([0.0, 0.0], tokens, kl_coef=0.5)
    assert loss == pytest.approx(0.5 * (math.exp(2) - 3 + 10), rel=1e-5)
    assert gradient == pytest.approx([0.5 * (1 - math.exp(2)), 0.0], rel=1e-5)
    assert metrics["reference/kl"].total == pytest.approx(math.exp(2) - 3 + 10, rel=1e-5)


def test_without_its_bound_k3_grows_as_the_ratio_does():
    _, gradient, _ = loss_and_gradient([0.0, 0.0], batch([2.0, 10.0]), kl_coef=0.5, kl_max=0.0)
    assert gradient[1] == pytest.approx(0.5 * (1 - math.exp(10)), rel=1e-5)


def test_k2_is_left_as_it_is_by_the_bound_of_k3():
    # (6^2) / 2 = 18, gradient log(current / reference) = -6.
    settings = dict(kl_coef=0.5, kl_estimator="k2")
    loss, gradient, _ = loss_and_gradient([0.0], batch([6.0]), **settings)
    assert (loss, gradient) == (pytest.approx(9.0), [pytest.approx(-3.0)])
