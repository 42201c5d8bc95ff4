"""The paper's equations, derived once more: numpy, float64, gradients by hand, 200,000 tokens.

Nothing here is shared with ``algo``, which is differentiated by autograd. What ``algo`` adds to the
paper is written here too: a log-ratio ends at 20, and beyond it a token has no gradient.

Shapes: N = tokens, in responses of 16.
"""

from dataclasses import dataclass
from itertools import cycle, product

import numpy as np
import pytest
import torch

from qurl_megatron.algo.kl import kl_penalty
from qurl_megatron.algo.objective import OBJECTIVES
from tests.support.objectives import terms_of

N, LENGTH = 200_000, 16
OWNERS = np.arange(N) // LENGTH


def log_probs(seed=0):
    """current, proximal, behaviour, advantage; log-ratios as in training, then up to 30 and 1e4."""
    draw = np.random.default_rng(seed)
    moved, apart = draw.normal(0, 0.3, N), draw.normal(0, 1.0, N)
    far, absurd = slice(150_000, 190_000), slice(190_000, N)
    for log_ratio in (moved, apart):
        log_ratio[far] = draw.uniform(-30, 30, 40_000)
        log_ratio[absurd] = draw.uniform(-1e4, 1e4, 10_000)
    proximal = -np.abs(draw.normal(1.5, 1.0, N))
    advantages = draw.normal(0, 1, N)
    advantages[::50] = 0.0
    return proximal + moved, proximal, proximal - apart, advantages


def ratio(log_ratio):
    """exp, and where it has a derivative."""
    return np.exp(np.clip(log_ratio, -20, 20)), np.abs(log_ratio) <= 20


@dataclass
class Token:
    """J, its derivative by log current, and whether the clip stops the token."""

    value: np.ndarray
    gradient: np.ndarray
    clipped: np.ndarray


def clipped_term(log_ratio, A, low, high):
    """min(R A, clip(R, low, high) A): where the second is smaller, R moves nothing."""
    R, moves = ratio(log_ratio)
    kept = np.minimum(np.maximum(R, low), high)
    stopped = kept * A < R * A
    return Token(np.where(stopped, kept, R) * A, np.where(stopped | ~moves, 0, R * A), stopped)


def times(weight, token):
    return Token(weight * token.value, weight * token.gradient, token.clipped)


def dual_clipped(token, weight, A, limit):
    """max(J, w limit A) where A < 0, without a gradient where that is the larger; 0 is off."""
    floor = weight * limit * A
    below = (limit > 0) & (A < 0) & (token.value < floor)
    value, gradient = np.where(below, floor, token.value), np.where(below, 0, token.gradient)
    return Token(value, gradient, token.clipped)


def weight_of(kind, rho, C=2.0):
    return {
        "naive": np.ones_like(rho),
        "proximal": np.ones_like(rho),
        "decoupled": rho,
        "tis": np.minimum(rho, C),
        "acr": np.minimum(rho, C),
        "icepop": np.where((rho >= 0.5) & (rho <= 5), rho, 0),
    }[kind]


def equation_1(current, proximal, behaviour, A, low, high, C):
    return clipped_term(current - proximal, A, 1 - low, 1 + high)


def equation_3(current, proximal, behaviour, A, low, high, C):
    return clipped_term(current - behaviour, A, 1 - low, 1 + high)


def equation_4(current, proximal, behaviour, A, low, high, C):
    weight, _ = ratio(proximal - behaviour)
    return times(weight, clipped_term(current - proximal, A, 1 - low, 1 + high))


def equation_5(current, proximal, behaviour, A, low, high, C):
    weight, _ = ratio(proximal - behaviour)
    return times(np.minimum(weight, C), clipped_term(current - proximal, A, 1 - low, 1 + high))


def equation_9(current, proximal, behaviour, A, low, high, C):
    weight, _ = ratio(proximal - behaviour)
    r = 1 / np.maximum(1, weight / C)  # Eqs. 6 and 8: behaviour over max(behaviour, proximal / C)
    token = clipped_term(current - proximal, A, 1 - low, (1 + high) / r)
    return times(np.minimum(weight, C), token)


def icepop(current, proximal, behaviour, A, low, high, C):
    """arXiv:2510.18855, which the paper does not have."""
    weight = weight_of("icepop", ratio(proximal - behaviour)[0])
    return times(weight, clipped_term(current - proximal, A, 1 - low, 1 + high))


EQUATIONS = {
    "proximal": equation_1,
    "naive": equation_3,
    "decoupled": equation_4,
    "tis": equation_5,
    "acr": equation_9,
    "icepop": icepop,
}
assert EQUATIONS.keys() == OBJECTIVES.keys()
# Clip low and high, C, dual clip.
SETTINGS = [(0.2, 0.2, 2.0, 0.0), (0.2, 0.28, 5.0, 1.6), (0.0, 4.0, 1.0, 0.0)]


def computed(inputs, **options):
    tensors = [torch.from_numpy(x) for x in inputs]
    tensors[0].requires_grad_()
    terms = terms_of(*tensors, **options)
    (gradient,) = torch.autograd.grad(terms.value.sum(), tensors[0])
    return Token(terms.value.detach().numpy(), gradient.numpy(), terms.clipped.numpy())


def assert_agree(found, expected):
    np.testing.assert_array_equal(found.clipped, expected.clipped)
    np.testing.assert_allclose(found.value, expected.value, rtol=1e-14, atol=0)
    np.testing.assert_allclose(found.gradient, expected.gradient, rtol=1e-14, atol=0)


@pytest.mark.parametrize("low, high, cap, dual", SETTINGS)
@pytest.mark.parametrize("kind", EQUATIONS)
def test_values_gradients_and_clips_are_the_papers(kind, low, high, cap, dual):
    _, proximal, behaviour, A = inputs = log_probs()
    weight = weight_of(kind, ratio(proximal - behaviour)[0], cap)
    expected = dual_clipped(EQUATIONS[kind](*inputs, low, high, cap), weight, A, dual)
    found = computed(inputs, kind=kind, clip_low=low, clip_high=high, cap=cap, dual_clip=dual)
    assert_agree(found, expected)
    assert 0.05 < expected.clipped.mean() < 0.6


def per_response(log_ratio, how):
    return how(log_ratio.reshape(-1, LENGTH), axis=1)[OWNERS]


LEVELS = {
    "token": lambda x: x,
    "sequence": lambda x: per_response(x, np.sum),
    "geometric": lambda x: per_response(x, np.mean),
}
RESPONSES = dict(owners=torch.from_numpy(OWNERS), responses=N // LENGTH)


SCALES = [
    *product(["decoupled", "tis", "acr"], LEVELS, ["token", "sequence"]),
    *product(["naive", "proximal", "icepop"], ["geometric"], ["sequence"]),
]


@pytest.mark.parametrize("kind, level, of", SCALES)
def test_the_weight_has_its_level_and_the_bound_the_scale_of_the_ratio(kind, level, of):
    current, proximal, behaviour, A = log_probs()
    A = per_response(A, np.mean)
    scale = LEVELS["token" if of == "token" else "geometric"]
    rho, own = (ratio(at(proximal - behaviour))[0] for at in (LEVELS[level], scale))
    upper = 1.2 * np.maximum(1, own / 2.0) if kind == "acr" else 1.2
    other = behaviour if kind == "naive" else proximal
    expected = times(weight_of(kind, rho), clipped_term(scale(current - other), A, 0.8, upper))
    inputs = (current, proximal, behaviour, A)
    found = computed(inputs, kind=kind, level=level, ratio=of, **RESPONSES)
    # A mean over a response rounds differently by the order of its sum.
    assert (found.clipped == expected.clipped).all()
    np.testing.assert_allclose(found.value, expected.value, rtol=1e-10)
    np.testing.assert_allclose(found.gradient, expected.gradient, rtol=1e-10)


@pytest.mark.parametrize("kind, dual", zip(EQUATIONS, cycle([0.0, 1.6]), strict=False))
def test_cispo_bounds_the_factor_and_raises_its_bound_for_good_tokens_alone(kind, dual):
    current, proximal, behaviour, A = inputs = log_probs()
    R, _ = ratio(current - (behaviour if kind == "naive" else proximal))
    rho, _ = ratio(proximal - behaviour)
    raised = (kind == "acr") & (A > 0)
    upper = np.where(raised, 1.2 * np.maximum(1, rho / 2.0), 1.2)
    weight = weight_of(kind, rho)
    gradient = weight * np.minimum(np.maximum(R, 0.8), upper) * A
    clipped = ((R < 0.8) | (upper < R)) & (A != 0)
    expected = dual_clipped(Token(gradient * current, gradient, clipped), weight, A, dual)
    assert_agree(computed(inputs, kind=kind, surrogate="cispo", dual_clip=dual), expected)


@pytest.mark.parametrize("highest", [0.0, 10.0])
def test_k3_ends_where_it_is_told_to_in_value_and_gradient(highest):
    current, reference, _, _ = log_probs()
    x = np.clip(reference - current, -20, 20)
    value, gradient = np.expm1(x) - x, -np.expm1(x) * (np.abs(reference - current) <= 20)
    if highest:
        gradient = np.where(value > highest, 0, gradient)
        value = np.minimum(value, highest)
    leaf = torch.from_numpy(current).requires_grad_()
    found = kl_penalty(leaf, torch.from_numpy(reference), "k3", highest=highest)
    (slope,) = torch.autograd.grad(found.sum(), leaf)
    np.testing.assert_allclose(found.detach().numpy(), value, rtol=1e-13)
    np.testing.assert_allclose(slope.numpy(), gradient, rtol=1e-13, atol=1e-15)  # 1 - x near 0
