"""Which responses are dropped for the mismatch of their policies."""

import torch

from qurl_megatron.algo.ratios import kept


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
