"""Ratios of whole responses: rho as a product or a geometric mean, GSPO's clipped ratio, and the
responses that are dropped for the mismatch of their policies."""

from itertools import product

import pytest
import torch

from qurl_megatron.algo.ratios import LEVELS, kept
from qurl_megatron.algo.segments import mean_per_response, owners_of, sum_per_response
from tests.support.objectives import terms_of

# (level of the weight's rho, what is clipped). The bound's rho is on the scale of what is clipped.
FORMS = list(product(["token", "sequence", "geometric"], ["token", "sequence"]))
BOUND = {"token": "token", "sequence": "geometric"}
LENGTHS = (4, 1, 0, 7, 2, 5, 3, 6, 1, 2) * 6


def random_responses(spread=0.5, drift=0.3, lengths=LENGTHS):
    """Log-probs of three policies, an advantage per response, and owners."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(3, sum(lengths), generator=generator, dtype=torch.float64)
    owners = owners_of(lengths)
    shift = torch.randn(2, len(lengths), generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    proximal = -2 - noise[0].abs()
    current = (proximal + drift * (noise[1] + shift[0][owners])).requires_grad_()
    behaviour = proximal - spread * (noise[2] + shift[1][owners])
    return (current, proximal, behaviour, advantages[owners]), owners


def run(inputs, owners, **options):
    leaf = inputs[0].detach().requires_grad_()
    responses = len(LENGTHS)
    terms = terms_of(leaf, *inputs[1:], owners=owners, responses=responses, **options)
    terms.value.sum().backward()
    return terms, leaf.grad


def test_sums_and_means_per_response_by_hand():
    owners = torch.tensor([0, 0, 2])
    values = torch.tensor([1.0, 2.0, 5.0])
    assert sum_per_response(values, owners, 3).tolist() == [3.0, 0.0, 5.0]
    assert mean_per_response(values, owners, 3).tolist() == [1.5, 0.0, 5.0]
    assert owners_of([2, 0, 1]).tolist() == [0, 0, 2]
    assert owners_of([]).tolist() == [] and sum_per_response(values[:0], owners[:0], 0).numel() == 0


def test_sums_do_not_lose_small_terms_beside_large_ones():
    values = torch.tensor([1e8, 1.0, -1e8])  # float32: 1e8 + 1 is 1e8
    assert sum_per_response(values, torch.zeros(3, dtype=torch.int64), 1).tolist() == [1.0]


@pytest.mark.parametrize("first_update", [True, False])
@pytest.mark.parametrize("level, ratio", FORMS)
def test_acr_is_tis_at_the_first_update_and_but_for_good_tokens_above_the_cap(
    level, ratio, first_update
):
    inputs, owners = random_responses(spread=1.0)
    if first_update:
        inputs = (inputs[1].clone(), *inputs[1:])
    (acr, grad), (tis, tis_grad) = (
        run(inputs, owners, kind=kind, level=level, ratio=ratio) for kind in ("acr", "tis")
    )
    log_rho = LEVELS[BOUND[ratio]](inputs[1] - inputs[2], owners, len(LENGTHS))
    raised = (log_rho.exp() > 2) & (inputs[3] > 0)
    assert torch.equal(acr.acr_active, raised) and 0.05 < raised.double().mean() < 0.9
    same = ~raised | first_update
    assert torch.equal(acr.value[same], tis.value[same])
    assert torch.equal(grad[same], tis_grad[same])
    assert torch.equal(grad, tis_grad) == first_update


@pytest.mark.parametrize("level, ratio", FORMS)
def test_a_rejected_response_leaves_the_others_as_they_were(level, ratio):
    inputs, owners = random_responses()
    keep = owners % 3 != 0
    spoiled = [torch.where(keep, x.detach(), torch.nan) for x in inputs]
    terms, gradient = run(spoiled, owners, kind="acr", level=level, ratio=ratio, keep=keep)
    whole, whole_gradient = run(inputs, owners, kind="acr", level=level, ratio=ratio)
    torch.testing.assert_close(terms.value, torch.where(keep, whole.value, 0.0))
    torch.testing.assert_close(gradient, torch.where(keep, whole_gradient, 0.0))


def decide(*responses, **thresholds):
    """Whether each response, given as the rho of its tokens, is kept."""
    rho = torch.tensor([r for response in responses for r in response], dtype=torch.float64)
    lengths = torch.tensor([len(response) for response in responses])
    owners = torch.arange(len(responses)).repeat_interleave(lengths)
    keep = kept(rho.log(), torch.zeros_like(rho), owners, len(responses), **thresholds)
    assert keep.shape == rho.shape and keep.dtype == torch.bool
    per_response = keep.split(lengths.tolist())
    assert all(len(set(k.tolist())) <= 1 for k in per_response)  # whole responses
    return [bool(k.all()) for k in per_response]


def test_nothing_is_dropped_unless_asked():
    assert decide([1e-99], [1e99], [1.0, 1e-99]) == [True, True, True]


def test_the_geometric_mean_of_rho_must_lie_within_its_bounds():
    # sqrt(4 * 1) = 2; sqrt(4 / 16) = 1/2; sqrt(100 / 100) = 1
    responses = ([4.0, 1.0], [4.0, 1 / 16], [100.0, 0.01])
    assert decide(*responses, high=1.9) == [False, True, True]
    assert decide(*responses, high=2.1) == [True, True, True]
    assert decide(*responses, low=0.51) == [True, False, True]
    assert decide(*responses, low=0.51, high=1.9) == [False, False, True]


def test_one_impossible_token_vetoes_its_response():
    responses = ([1.0, 1e-5, 1e5], [1.0, 1e-3], [1e9])
    assert decide(*responses, veto=1e-4) == [False, True, True]
    assert decide(*responses, veto=1e-6) == [True, True, True]


def test_thresholds_beyond_where_ratios_are_cut_off_still_count():
    assert decide([1e-12], [1e-9], veto=1e-10) == [False, True]


def test_empty_responses_are_no_trouble():
    assert decide([], [4.0], [], low=0.5, high=2.0) == [True, False, True]


def test_both_policies_alike_are_always_kept():
    log_probs = -torch.rand(9)
    owners = torch.tensor([0, 0, 1, 1, 1, 2, 4, 4, 4])
    assert kept(log_probs, log_probs, owners, 5, low=1.0, high=1.0, veto=0.99).all()
