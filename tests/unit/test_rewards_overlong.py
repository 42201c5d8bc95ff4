"""The soft overlong punishment against DAPO's Eq. 13, worked by hand."""

from pathlib import Path

import pytest
import torch

from qurl_megatron.algo.advantages import group_advantages
from qurl_megatron.config import load
from qurl_megatron.data.responses import Summary
from qurl_megatron.rewards import overlong_penalty
from qurl_megatron.training.credit import shaped_rewards

DAPO = Path(__file__).parents[2] / "launch" / "recipes" / "dapo_qwen2.5_7b_math.toml"


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (17408, -0.25), (20480, -1.0), (30000, -1.0)],
)
def test_it_falls_over_the_last_fifth_as_in_the_paper(length, expected):
    # L_max = 20480 and L_cache = 4096: (16384 - length) / 4096 in between.
    assert overlong_penalty(length, 20480, 0.2, 1.0) == pytest.approx(expected, abs=1e-12)
    assert overlong_penalty(length, 20480, 0.2, 0.6) == pytest.approx(0.6 * expected, abs=1e-12)
    assert overlong_penalty(length, 20480, 0.0, 1.0) == 0.0  # turned off


@pytest.mark.parametrize("overrides", [[], ["algo.name=dapo"]], ids=["recipe", "preset"])
def test_dapos_advantages_are_those_of_its_rewards_of_one_and_minus_one(overrides):
    """Right short, right at the limit, wrong short, wrong at the limit."""
    config = load(DAPO, overrides)
    lengths = torch.tensor([100, 8192, 100, 8192])
    given = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    same = torch.zeros(4, dtype=torch.int64)
    summary = Summary(torch.ones_like(lengths), 2 * lengths, lengths, given, lengths == 8192, same)
    # DAPO's rewards are 1, 1 - 1, -1, -1 - 1: mean -1/2, sample deviation sqrt(5 / 3).
    expected = torch.tensor([[1.5, 0.5, -0.5, -1.5]]) / (5 / 3) ** 0.5
    advantages = group_advantages(shaped_rewards(summary, config)[None])
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=0)
    assert advantages[0].tolist() == pytest.approx([1.162, 0.387, -0.387, -1.162], abs=1e-3)
