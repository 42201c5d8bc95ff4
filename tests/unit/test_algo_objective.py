"""The five objectives: hand-worked numbers, and what distinguishes them."""

import math

import pytest
import torch

from qurl_megatron.algo import OBJECTIVES, objective, objective_terms

KINDS = sorted(OBJECTIVES)


def tokens(*rows, requires_grad=True):
    """Log-probs from rows of (R, rho, A): current / proximal, proximal / behaviour, advantage."""
    ratio, rho, advantages = torch.tensor(rows, dtype=torch.float64).unbind(1)
    proximal = torch.full_like(ratio, -1.5)
    current = (proximal + ratio.log()).requires_grad_(requires_grad)
    return current, proximal, proximal - rho.log(), advantages


def value_and_gradient(kind, *rows, **options):
    current, *others = tokens(*rows)
    value = objective(current, *others, kind=kind, **options)
    value.sum().backward()
    return value.detach(), current.grad


def random_tokens(count=400, spread=1.0):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4, count, generator=generator, dtype=torch.float64)
    proximal = -noise[0].abs()
    current = (proximal + 0.3 * noise[1]).requires_grad_()
    return current, proximal, proximal + spread * noise[2], noise[3]


@pytest.mark.parametrize(
    "kind, expected",
    [
        # R = 1.1, rho = 4, A = 2; clip range [0.8, 1.2], C = 2.
        ("naive", 1.2 * 2),  # the ratio to behaviour is 4.4: clipped
        ("proximal", 1.1 * 2),
        ("decoupled", 4 * 1.1 * 2),
        ("tis", 2 * 1.1 * 2),
        ("acr", 2 * 1.1 * 2),
    ],
)
def test_inside_the_clip_range_by_hand(kind, expected):
    value, gradient = value_and_gradient(kind, (1.1, 4.0, 2.0))
    assert value.item() == pytest.approx(expected)
    # d/d(log pi) of w * R * A is the value itself; a clipped token has none.
    assert gradient.item() == pytest.approx(0 if kind == "naive" else expected)


@pytest.mark.parametrize(
    "kind, expected, flows",
    [
        # R = 1.5, rho = 4, A = 2: above 1.2, below (1 + 0.2) / r = 2.4.
        ("naive", 1.2 * 2, False),
        ("proximal", 1.2 * 2, False),
        ("decoupled", 4 * 1.2 * 2, False),
        ("tis", 2 * 1.2 * 2, False),
        ("acr", 2 * 1.5 * 2, True),
    ],
)
def test_only_acr_lets_a_truncated_positive_token_pass_the_upper_bound(kind, expected, flows):
    value, gradient = value_and_gradient(kind, (1.5, 4.0, 2.0))
    assert value.item() == pytest.approx(expected)
    assert gradient.item() == pytest.approx(expected if flows else 0)


def test_acr_gradient_passes_up_to_the_widened_bound_and_stops_after():
    # rho = 5, C = 2: r = 0.4, bound 1.2 / 0.4 = 3.
    value, gradient = value_and_gradient("acr", (2.999, 5.0, 1.0), (3.001, 5.0, 1.0))
    assert gradient[0].item() == pytest.approx(2 * 2.999)
    assert gradient[1].item() == 0 and value[1].item() == pytest.approx(2 * 3)


def test_a_ratio_exactly_on_a_bound_keeps_its_whole_gradient():
    zero = torch.zeros(2)
    current = torch.tensor([0.0, 0.0], requires_grad=True)
    objective(
        current, zero, zero, torch.tensor([1.0, -1.0]), clip_low=0, clip_high=0
    ).sum().backward()
    assert current.grad.tolist() == [1.0, -1.0]


def test_negative_advantage_is_clipped_below_and_never_above():
    value, gradient = value_and_gradient("proximal", (0.5, 1.0, -1.0), (3.0, 1.0, -1.0))
    torch.testing.assert_close(value, torch.tensor([-0.8, -3.0], dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([0.0, -3.0], dtype=torch.float64))


def test_clip_low_and_high_are_separate():
    rows = ((0.5, 1.0, -1.0), (2.0, 1.0, 1.0))
    value, _ = value_and_gradient("tis", *rows, clip_low=0.3, clip_high=0.28)
    torch.testing.assert_close(value, torch.tensor([-0.7, 1.28], dtype=torch.float64))


def same(a, b, where=slice(None)):
    (value_a, grad_a), (value_b, grad_b) = a, b
    assert torch.equal(value_a[where], value_b[where]) and torch.equal(grad_a[where], grad_b[where])


def evaluate(kind, inputs, **options):
    current, *others = inputs
    current = current.detach().requires_grad_()
    value = objective(current, *others, kind=kind, **options)
    value.sum().backward()
    return value.detach(), current.grad


def test_acr_is_tis_where_the_weight_is_not_truncated():
    inputs = random_tokens()
    untruncated = (inputs[1] - inputs[2]).exp() <= 2.0
    assert 0.1 < untruncated.double().mean() < 0.9
    same(evaluate("acr", inputs), evaluate("tis", inputs), untruncated)


def test_acr_is_tis_for_negative_advantages():
    inputs = random_tokens()
    same(evaluate("acr", inputs), evaluate("tis", inputs), inputs[3] <= 0)


def test_acr_is_tis_at_the_first_update_of_a_batch():
    _, proximal, behaviour, advantages = random_tokens()
    inputs = (proximal.clone(), proximal, behaviour, advantages)
    same(evaluate("acr", inputs), evaluate("tis", inputs))


def test_acr_differs_from_tis_somewhere():
    inputs = random_tokens()
    assert not torch.equal(evaluate("acr", inputs)[0], evaluate("tis", inputs)[0])


def test_acr_equals_the_papers_formula():
    current, proximal, behaviour, advantages = inputs = random_tokens()
    rho, ratio = (proximal - behaviour).exp(), (current - proximal).exp()
    r = torch.clamp(2.0 / rho, max=1)
    clipped = torch.minimum(ratio.clamp(min=0.8), 1.2 / r)
    expected = rho.clamp(max=2) * torch.minimum(ratio * advantages, clipped * advantages)
    torch.testing.assert_close(evaluate("acr", inputs)[0], expected.detach())


def test_all_kinds_agree_when_rollouts_are_not_quantized():
    current, proximal, _, advantages = random_tokens()
    inputs = (current, proximal, proximal, advantages)
    for kind in KINDS:
        same(evaluate(kind, inputs), evaluate("proximal", inputs))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_ratios_stay_finite_in_value_and_gradient(kind, dtype):
    gaps = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], dtype=dtype)
    grid = torch.cartesian_prod(gaps, gaps, torch.tensor([-3.0, 0.0, 3.0], dtype=dtype))
    current = grid[:, 0].clone().requires_grad_()
    terms = objective_terms(current, torch.zeros_like(gaps[0]), -grid[:, 1], grid[:, 2], kind=kind)
    terms.value.sum().backward()
    assert terms.value.isfinite().all() and current.grad.isfinite().all()
    assert terms.rho.isfinite().all() and terms.weight.isfinite().all()


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
    acr = objective_terms(*tokens(*rows), kind="acr")
    assert acr.clipped.tolist() == [False, False, True, False, True, True]
    assert acr.truncated.tolist() == [False, True, True, True, False, True]
    assert acr.acr_active.tolist() == [False, True, True, True, False, False]
    assert acr.acr_rescued.tolist() == [False, True, False, False, False, False]
    torch.testing.assert_close(acr.weight, torch.tensor([1, 2, 2, 2, 1, 2.0]).double())
    tis = objective_terms(*tokens(*rows), kind="tis")
    assert tis.clipped.tolist() == [False, True, True, False, True, True]
    assert not tis.acr_active.any() and not tis.acr_rescued.any()
    assert (tis.clipped & ~acr.clipped).tolist() == acr.acr_rescued.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_clipped_tokens_are_exactly_those_without_gradient(kind):
    current, *others = random_tokens()
    terms = objective_terms(current, *others, kind=kind)
    terms.value.sum().backward()
    assert torch.equal(current.grad == 0, terms.clipped)
    for name in ("ratio", "rho", "weight"):
        assert not getattr(terms, name).requires_grad


def test_any_shape_and_none():
    zero = torch.zeros(2, 3)
    assert objective(zero, zero, zero, zero).shape == (2, 3)
    assert objective(zero[:0], zero[:0], zero[:0], zero[:0]).shape == (0, 3)


def test_weight_of_the_decoupled_objective_is_not_truncated():
    value, _ = value_and_gradient("decoupled", (1.0, 1e5, 1.0))
    assert value.item() == pytest.approx(1e5)
    assert objective(
        *(torch.tensor(x) for x in (0.0, 0.0, -50.0, 1.0)), kind="decoupled"
    ).item() == pytest.approx(math.exp(20))
