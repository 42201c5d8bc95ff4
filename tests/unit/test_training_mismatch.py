"""What is logged about the gap between the quantized and the full-precision policy."""

import math
import re

import pytest
import torch

from qurl_megatron.algo.segments import owners_of
from qurl_megatron.observe.metrics import merge, values
from qurl_megatron.training.mismatch import Alarms, mismatch


def measure(rho_of_responses, proximal_of_responses, cap=2.0):
    """Metrics of responses given as the rho and the proximal probability of each token."""
    rho, proximal = (
        torch.tensor([x for response in responses for x in response], dtype=torch.float64)
        for responses in (rho_of_responses, proximal_of_responses)
    )
    owners = owners_of([len(response) for response in rho_of_responses])
    return mismatch(
        proximal.log(), proximal.log() - rho.log(), owners, len(rho_of_responses), cap=cap
    )


def test_every_metric_by_hand():
    # Proximal probabilities 0.5, 0.2 | 0.4 with rho 4, 1 | 0.25: behaviour 0.125, 0.2 | 1.6.
    # (1.6 is no probability; it makes for short numbers.)
    log2 = math.log(2)
    expected = {
        "kl_k1": (-2 + 0 + 2) * log2 / 3,
        "kl_k3": (3 - 2 * log2 + 0 - 0.75 + 2 * log2) / 3,
        "rho_mean": 1.75,
        "rho_max": 4,
        "rho_min": 0.25,
        # deviations 2.25, -0.75, -1.5: (5.0625 + 0.5625 + 2.25) / 2
        "rho_std": math.sqrt(3.9375),
        "ess": 5.25**2 / (3 * 17.0625),
        "rho_beyond": 0,
        "tokens": 3,
        "truncated_weight_fraction": 1 / 3,
        "low_weight_fraction": 1 / 3,
        "log_prob_diff_abs": 4 * log2 / 3,
        "prob_diff_mean": (0.375 + 0 + 1.2) / 3,
        "prob_diff_max": 1.2,
        # deviations -0.15, -0.525, 0.675
        "prob_diff_std": math.sqrt((0.0225 + 0.275625 + 0.455625) / 2),
        # products 4 | 1/4, geometric means 2 | 1/4
        "rho_sequence_mean": 2.125,
        "rho_sequence_max": 4,
        "rho_sequence_min": 0.25,
        "rho_geometric_mean": 1.125,
        "rho_geometric_max": 2,
        "rho_geometric_min": 0.25,
        # 1 / sqrt(0.5 * 0.2) | 1 / 0.4, and 1 / sqrt(0.125 * 0.2) | 1 / 1.6
        "ppl_proximal": (math.sqrt(10) + 2.5) / 2,
        "ppl_behaviour": (math.sqrt(40) + 0.625) / 2,
    }
    measured = values(measure([[4.0, 1.0], [0.25]], [[0.5, 0.2], [0.4]]))
    assert measured == pytest.approx({f"rollout/{k}": v for k, v in expected.items()}, rel=1e-6)


def test_ratios_that_rounding_does_not_explain_are_counted_and_told_of_less_and_less_often():
    sane = values(measure([[1090.0, *[1.0] * 9]], [[0.5] * 10]))  # the largest of honest four bits
    wrong = values(measure([[math.exp(9.3), 1.0], [2e5]], [[0.5, 0.2], [0.4]]))
    assert (sane["rollout/rho_beyond"], wrong["rollout/rho_beyond"]) == (0, 2)
    told = Alarms()
    said = [told.noticed(metrics) for metrics in [sane, wrong, wrong, sane, *[wrong] * 7]]
    # Of eleven steps nine are bad, and of those the first, the second, the fourth and the eighth
    # are told of.
    assert [step for step, what in enumerate(said) if what] == [1, 2, 5, 9]
    assert said[1].startswith("2 tokens have more than 10000 times the probability")
    assert "the largest ratio is 2e+05" in said[1] and "guard.rho_above" in said[1]
    assert Alarms().noticed({}) is None  # without tokens there is no ratio


def test_a_step_whose_tokens_are_another_models_is_told_of():
    far = values(measure([[math.exp(1.2), math.exp(-1.2)] * 600], [[0.1, 0.1] * 600]))
    assert "is 1.2 on average (rollout/log_prob_diff_abs)" in Alarms().noticed(far)
    near = values(measure([[math.exp(0.9), math.exp(-2)] + [1.0] * 1200], [[0.1] * 1202]))
    assert Alarms().noticed(near) is None


def sampled(behaviour, proximal, tokens, reported=None):
    """Metrics of tokens drawn from one distribution, with the log-probs that an engine reports."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.multinomial(behaviour, tokens, replacement=True, generator=generator)
    reported = behaviour if reported is None else reported
    owners = torch.zeros(tokens, dtype=torch.int64)
    return values(mismatch(proximal.log()[ids], reported.log()[ids], owners, 1, cap=2.0))


LOGITS = torch.linspace(0, 3, 30, dtype=torch.float64)
COOL, PLAIN = (LOGITS / 0.6).softmax(0), LOGITS.softmax(0)


def test_log_probs_of_another_distribution_than_the_sampled_one_are_told_of():
    said = Alarms().noticed(sampled(COOL, COOL, 5000, reported=PLAIN))
    assert re.match(r"the mean ratio of the 5000 tokens is 1\.\d+, with an error of 0\.\d+, ", said)
    assert "(SGLANG_RETURN_ORIGINAL_LOGPROB)" in said
    # Tokens of the upper part alone, each with its probability among these.
    nucleus = torch.where(PLAIN > 0.04, PLAIN, 0.0)
    assert "is 0." in Alarms().noticed(sampled(nucleus / nucleus.sum(), PLAIN, 5000))


@pytest.mark.parametrize("noise", [0.1, 0.4, 0.7])
@pytest.mark.parametrize("tokens", [20, 1500, 50_000])
def test_an_honest_engine_is_not_accused_however_noisy_it_is(noise, tokens):
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        errors = torch.randn(len(LOGITS), generator=generator, dtype=torch.float64)
        quantized = (LOGITS + noise * errors).softmax(0)
        assert Alarms().noticed(sampled(quantized, PLAIN, tokens)) is None


def test_few_tokens_say_nothing_of_their_mean():
    assert Alarms().noticed(values(measure([[0.8] * 900], [[0.5] * 900]))) is None
    assert Alarms().noticed(values(measure([[0.8] * 1000], [[0.5] * 1000]))) is not None


def test_merging_microbatches_and_ranks_equals_measuring_everything_at_once():
    lengths = [5, 0, 9, 1, 30, 2, 0, 7]
    noise = torch.randn(2, sum(lengths), generator=torch.Generator().manual_seed(0))
    proximal, owners = -noise[0].abs(), owners_of(lengths)
    behaviour = (proximal - 0.2 * noise[1]).clamp(max=0)
    whole = values(mismatch(proximal, behaviour, owners, len(lengths), cap=1.1))
    assert not any(math.isnan(value) for value in whole.values())
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    parts = []
    for members in ([0, 1], [2], [], [3, 4, 5], [6], [7]):
        tokens = [t for m in members for t in range(starts[m], starts[m + 1])]
        local = owners_of([lengths[m] for m in members])
        parts.append(mismatch(proximal[tokens], behaviour[tokens], local, len(members), cap=1.1))
    ranks = [merge(parts[:2]), merge(parts[2:])]
    assert values(merge(ranks)) == pytest.approx(whole, rel=1e-9)


def test_without_tokens_there_is_no_extreme_and_nothing_to_average():
    nothing = torch.zeros(0)
    metrics = mismatch(nothing, nothing, torch.zeros(0, dtype=torch.int64), 2, cap=2.0)
    measured = values(metrics)
    assert measured.pop("rollout/rho_beyond") == measured.pop("rollout/tokens") == 0
    assert all(math.isnan(value) for value in measured.values())
    assert not any(name.endswith(("_max", "_min")) for name in metrics)


def test_extreme_gaps_leave_every_value_finite():
    proximal = torch.tensor([-1e4, 0.0, -1e4, -1.0])
    behaviour = torch.tensor([0.0, -1e4, -1e4, -1.0])
    metrics = mismatch(proximal, behaviour, torch.tensor([0, 1, 2, 2]), 3, cap=2.0)
    assert all(math.isfinite(value) for value in values(metrics).values())
    assert metrics["rollout/rho_max"].value == pytest.approx(math.exp(20))
