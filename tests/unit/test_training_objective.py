"""The loss of a microbatch, term by term, for log-probs that are given instead of computed."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from qurl_megatron.actor.megatron import Axis
from qurl_megatron.config import AlgoConfig
from qurl_megatron.data.pack import TokenBatch, pad_samples
from qurl_megatron.data.responses import Responses
from qurl_megatron.observe.metrics import merge
from qurl_megatron.training.losses import PolicyLoss, Scorer
from qurl_megatron.types import Prompt, Sample


def batch(reference, *, behaviour=None, proximal=None, advantages=None):
    """One response; its tokens weigh 1 each, so that the loss is the sum over them."""
    n = len(reference)
    zero, ids = torch.zeros(n), torch.zeros(1, n, dtype=torch.int64)
    return TokenBatch(
        *(ids, ids, ids == 0, ids, ids == 0, (0,), (n,), torch.zeros(n, dtype=torch.int64)),
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


@pytest.mark.parametrize(
    ("log_ratio", "settings", "kl", "gradient"),
    [
        # log(reference / current) = 2: k3 = e^2 - 3, its gradient 1 - e^2.
        (2.0, {}, math.exp(2) - 3, 1 - math.exp(2)),
        # At 10 it would be e^10 - 11; it ends at 10, and with it its gradient.
        (10.0, {}, 10, 0),
        (10.0, {"kl_max": 0.0}, math.exp(10) - 11, 1 - math.exp(10)),
        # 6^2 / 2, gradient log(current / reference); the bound is k3's alone.
        (6.0, {"kl_estimator": "k2"}, 18, -6),
    ],
)
def test_the_kl_of_a_token_and_its_bound(log_ratio, settings, kl, gradient):
    loss, gradients, metrics = loss_and_gradient([0.0], batch([log_ratio]), kl_coef=0.5, **settings)
    assert loss == pytest.approx(0.5 * kl, rel=1e-5)
    assert gradients == pytest.approx([0.5 * gradient], rel=1e-5)
    assert metrics["reference/kl"].total == pytest.approx(kl, rel=1e-5)


def test_tokens_without_a_proximal_log_prob_are_compared_with_themselves():
    """As in the first update of a step: the ratio is 1, and rho that of the rollout."""
    tokens = batch([0.0], behaviour=torch.tensor([-1.5]), advantages=torch.tensor([2.0]))
    expected = loss_and_gradient([-1.0], replace(tokens, proximal=torch.tensor([-1.0])))
    loss, gradient, metrics = loss_and_gradient([-1.0], replace(tokens, proximal=None))
    assert (loss, gradient) == expected[:2] == (pytest.approx(-2 * math.exp(0.5)), [loss])
    assert metrics.keys() > expected[2].keys()
    assert metrics["rollout/rho_mean"].total == pytest.approx(math.exp(0.5))


RESCUED = [  # R, rho, A
    (1.1, 1.0, 1.0),  # as it is: |w R A| = 1.1
    (1.5, 4.0, 1.0),  # w = 2; rescued, since 1.2 < 1.5 <= 2.4: 3
    (2.5, 4.0, 1.0),  # clipped all the same
    (0.5, 4.0, -1.0),  # clipped below
    (1.1, 4.0, -2.0),  # w = 2: 4.4
]


def share_of(rows, **settings):
    ratio, rho, advantages = torch.tensor(rows).unbind(1)
    tokens = batch([0.0] * len(rows), behaviour=-rho.log(), advantages=advantages)
    _, _, metrics = loss_and_gradient(ratio.log().tolist(), tokens, **settings)
    return {name: metric for name, metric in metrics.items() if name == "acr/gradient_share"}


def test_the_share_of_rescued_tokens_is_of_the_gradient_of_all_that_are_not_clipped():
    share = share_of(RESCUED)["acr/gradient_share"]
    assert (share.total, share.weight) == (pytest.approx(3.0), pytest.approx(8.5))
    assert share_of(RESCUED, objective="tis")["acr/gradient_share"].value == 0
    # The dual clip at 1.05 takes the gradient of the last.
    clipped = share_of(RESCUED, dual_clip=1.05)["acr/gradient_share"]
    assert clipped.value == pytest.approx(3.0 / 4.1)
    assert share_of([(1.1, 1.0, 0.0)]) == {}  # a step that learns nothing has no share


@pytest.mark.parametrize("cuts", [(1,), (2, 4), (1, 2, 3, 4)])
def test_the_share_is_the_same_however_tokens_are_split_over_microbatches_and_ranks(cuts):
    places = [0, *cuts, len(RESCUED)]
    parts = [share_of(RESCUED[a:b]) for a, b in zip(places, places[1:], strict=False)]
    merged = merge(parts)["acr/gradient_share"]
    assert merged.value == pytest.approx(3.0 / 8.5)


def masked(told: list[float]) -> TokenBatch:
    """One response of two turns, with two tokens of a tool between them."""
    made = Sample(
        Prompt(0, (1, 2), "", ""),
        response_ids=(3, 4, 5, 6, 7),
        behaviour_log_probs=(-0.5, -1.0, *told, -1.5),
        finish_reason="stop",
        versions=((0, 3),),
        written=(True, True, False, False, True),
    )
    return pad_samples(Responses.of([made]), [0], [0.2], length=8)


def test_what_the_policy_did_not_write_neither_trains_nor_counts():
    ranks = SimpleNamespace(tensor=Axis(None, 0, 1), context=Axis(None, 0, 1))
    score = Scorer(SimpleNamespace(ranks=ranks, arch=SimpleNamespace(vocab=9)), 1.0)
    algo = AlgoConfig(kl_coef=0.5, entropy_coef=0.1)
    drawn = torch.randn(1, 8, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for told in ([0.0, 0.0], [-9.0, math.nan]):
        scored = replace(masked(told), advantages=torch.tensor([1.0, -1.0, 2.0]))
        with torch.no_grad():
            proximal = score(drawn.clone(), scored)[0]
        scored = replace(scored, proximal=proximal, reference=proximal - 0.3)
        leaf = drawn.clone().requires_grad_()
        loss, metrics = PolicyLoss(score, algo)(leaf * 1.0, scored)
        loss.backward()
        # Of five response tokens 3, 4 and 7 are predicted at places 1, 2 and 5, and nothing else.
        trained = leaf.grad[0].abs().sum(-1)
        assert trained.nonzero().flatten().tolist() == [1, 2, 5]
        assert not leaf.grad[0, [0, 3, 4, 6, 7]].any()
        sums = {"policy/loss", "acr/gradient_share"}
        assert {m.weight for name, m in metrics.items() if name not in sums} == {3.0}
        found.append((loss.item(), leaf.grad, {n: m.total for n, m in metrics.items()}))
    (one, gradient, seen), (two, other, seen_too) = found
    assert one == two and torch.equal(gradient, other) and seen == seen_too
