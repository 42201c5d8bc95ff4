"""The objectives, token by token: hand-worked numbers, and what distinguishes them."""

import math

import pytest
import torch

from qurl_megatron.algo import objective
from qurl_megatron.algo.objective import OBJECTIVES, Limits
from qurl_megatron.config.sections import AlgoConfig, CorrectionConfig
from tests.support.objectives import terms_of

KINDS = sorted(OBJECTIVES)


def tokens(*rows, requires_grad=True):
    """Log-probs from rows of (R, rho, A): current / proximal, proximal / behaviour, advantage."""
    ratio, rho, advantages = torch.tensor(rows, dtype=torch.float64).unbind(1)
    proximal = torch.full_like(ratio, -1.5)
    current = (proximal + ratio.log()).requires_grad_(requires_grad)
    return current, proximal, proximal - rho.log(), advantages


def value_and_gradient(kind, *rows, **options):
    return evaluate(kind, tokens(*rows), **options)


def evaluate(kind, inputs, **options):
    current, *others = inputs
    current = current.detach().requires_grad_()
    value = terms_of(current, *others, kind=kind, **options).value
    value.sum().backward()
    return value.detach(), current.grad


def random_tokens(count=400, spread=1.0):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4, count, generator=generator, dtype=torch.float64)
    proximal = -noise[0].abs()
    current = (proximal + 0.3 * noise[1]).requires_grad_()
    return current, proximal, proximal + spread * noise[2], noise[3]


@pytest.mark.parametrize(
    "kind, expected, flows",
    [
        # R = 1.5, rho = 4, A = 2: above 1.2, below (1 + 0.2) / r = 2.4.
        ("naive", 1.2 * 2, False),
        ("proximal", 1.2 * 2, False),
        ("decoupled", 4 * 1.2 * 2, False),
        ("tis", 2 * 1.2 * 2, False),
        ("acr", 2 * 1.5 * 2, True),
        ("icepop", 4 * 1.2 * 2, False),
    ],
)
def test_only_acr_lets_a_truncated_positive_token_pass_the_upper_bound(kind, expected, flows):
    value, gradient = value_and_gradient(kind, (1.5, 4.0, 2.0))
    assert value.item() == pytest.approx(expected)
    assert gradient.item() == pytest.approx(expected if flows else 0)


def test_a_ratio_exactly_on_a_bound_keeps_its_whole_gradient():
    zero = torch.zeros(2)
    current = torch.tensor([0.0, 0.0], requires_grad=True)
    objective(
        current, zero, zero, torch.tensor([1.0, -1.0]), clip_low=0, clip_high=0
    ).sum().backward()
    assert current.grad.tolist() == [1.0, -1.0]


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_current_policy_is_differentiated(kind):
    current, proximal, behaviour, advantages = random_tokens()
    proximal, behaviour = proximal.requires_grad_(), behaviour.detach().requires_grad_()
    objective(current, proximal, behaviour, advantages, kind=kind).sum().backward()
    assert current.grad is not None and proximal.grad is None and behaviour.grad is None


def test_terms_say_what_happened_to_each_token():
    rows = [
        (1.1, 1.0, 1.0),  # nothing
        (1.5, 4.0, 1.0),  # active, rescued: 1.2 < 1.5 <= 2.4
        (2.5, 4.0, 1.0),  # active, clipped all the same
        (1.1, 4.0, 1.0),  # active, TIS would not have clipped it either
        (1.5, 1.0, 1.0),  # clipped
        (0.5, 4.0, -1.0),  # truncated, clipped below; a negative token is never active
    ]
    acr = terms_of(*tokens(*rows), kind="acr")
    assert acr.clipped.tolist() == [False, False, True, False, True, True]
    assert acr.acr_active.tolist() == [False, True, True, True, False, False]
    assert acr.acr_rescued.tolist() == [False, True, False, False, False, False]
    torch.testing.assert_close(acr.weight, torch.tensor([1, 2, 2, 2, 1, 2.0]).double())
    tis = terms_of(*tokens(*rows), kind="tis")
    assert tis.clipped.tolist() == [False, True, True, False, True, True]
    assert not tis.acr_active.any() and not tis.acr_rescued.any()
    assert (tis.clipped & ~acr.clipped).tolist() == acr.acr_rescued.tolist()


def test_every_number_is_a_setting_of_its_name_and_default():
    algo = AlgoConfig(clip_low=0.1, clip_high=0.3, cap=3.0, dual_clip=4.0)
    correction = CorrectionConfig(band_low=0.25, band_high=4.0)
    assert Limits.of(algo, correction) == Limits(0.1, 0.3, 3.0, 4.0, 0.25, 4.0)
    assert Limits.of(AlgoConfig(), CorrectionConfig()) == Limits()
    settings = vars(algo).keys() | vars(correction).keys()
    assert vars(Limits()).keys() <= settings


def test_the_public_objective_takes_the_papers_numbers():
    inputs = random_tokens()
    numbers = dict(kind="tis", clip_low=0.1, clip_high=0.28, cap=1.5)
    assert torch.equal(objective(*inputs, **numbers), terms_of(*inputs, **numbers).value)


def test_any_shape_and_none():
    zero = torch.zeros(2, 3)
    assert objective(zero, zero, zero, zero).shape == (2, 3)
    assert objective(zero[:0], zero[:0], zero[:0], zero[:0]).shape == (0, 3)


def test_icepop_keeps_rho_within_the_band_and_drops_the_token_outside():
    rows = [(1.1, rho, 2.0) for rho in (0.49, 0.51, 1.0, 4.99, 5.01)]
    value, gradient = value_and_gradient("icepop", *rows)
    expected = torch.tensor([0, 0.51, 1.0, 4.99, 0]).double() * 1.1 * 2
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient, expected)
    narrow, _ = value_and_gradient("icepop", *rows, band_low=0.9, band_high=1.1)
    assert (narrow != 0).tolist() == [False, False, True, False, False]
    assert terms_of(*tokens(*rows), kind="icepop").banded.tolist() == [
        *(True, False, False, False, True)
    ]


def test_dual_clip_ends_what_a_likely_bad_token_costs():
    # A = -2: the objective would be R A = -8, but not below 3 A = -6; at R = 2.9 it is free.
    rows = [(4.0, 1.0, -2.0), (2.9, 1.0, -2.0), (0.5, 1.0, -2.0), (4.0, 1.0, 2.0)]
    value, gradient = value_and_gradient("proximal", *rows, dual_clip=3.0)
    torch.testing.assert_close(value, torch.tensor([-6.0, -5.8, -1.6, 2.4]).double())
    torch.testing.assert_close(gradient, torch.tensor([0.0, -5.8, 0.0, 0.0]).double())
    terms = terms_of(*tokens(*rows), kind="proximal", dual_clip=3.0)
    assert terms.dual_clipped.tolist() == [True, False, False, False]
    assert terms.clipped.tolist() == [False, False, True, True]
    off = terms_of(*tokens(*rows), kind="proximal")
    assert not off.dual_clipped.any() and off.value[0].item() == pytest.approx(-8)


def test_cispo_with_acr_has_the_raised_bound_for_good_tokens_alone():
    # rho = 4, C = 2: w = 2, and the factor may reach 1.2 * 2 = 2.4 where A > 0, else 1.2.
    rows = [(2.0, 4.0, 1.0), (2.0, 4.0, -1.0), (3.0, 4.0, 1.0)]
    _, gradient = value_and_gradient("acr", *rows, surrogate="cispo")
    torch.testing.assert_close(gradient, 2 * torch.tensor([2.0, -1.2, 2.4]).double())
    terms = terms_of(*tokens(*rows), kind="acr", surrogate="cispo")
    assert terms.acr_active.tolist() == [True, False, True]
    assert terms.acr_rescued.tolist() == [True, False, False]
    assert terms.clipped.tolist() == [False, True, True]


@pytest.mark.parametrize("surrogate", ["clip", "cispo"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_are_not_kept_are_silent_even_with_impossible_log_probs(kind, surrogate):
    current, *others = random_tokens(count=6)
    keep = torch.tensor([True, False, True, False, False, True])
    bad = torch.tensor([0, math.nan, 0, math.inf, -math.inf, 0], dtype=torch.float64)
    spoiled = [(x.detach() + bad) for x in (current, *others)]
    options = dict(kind=kind, surrogate=surrogate, dual_clip=2.0)
    leaf = spoiled[0].requires_grad_()
    terms = terms_of(leaf, *spoiled[1:], keep=keep, **options)
    terms.value.sum().backward()
    value, gradient = evaluate(inputs=(current, *others), **options)
    torch.testing.assert_close(terms.value.detach(), torch.where(keep, value, 0.0))
    torch.testing.assert_close(leaf.grad, torch.where(keep, gradient, 0.0))
    assert (terms.weight[~keep] == 0).all()
    assert not (terms.clipped | terms.dual_clipped)[~keep].any()
