"""What counts as the right answer; DAPO's soft overlong punishment, worked by hand."""

from decimal import Decimal
from pathlib import Path

import pytest
import torch

from qurl_megatron.algo.advantages import group_advantages
from qurl_megatron.config import load
from qurl_megatron.data.responses import Summary
from qurl_megatron.rewards.verifiers import KINDS, last_number, overlong_penalty
from qurl_megatron.training.credit import shaped_rewards

DAPO = Path(__file__).parents[2] / "launch" / "recipes" / "dapo_qwen2.5_7b_math.toml"


@pytest.mark.parametrize(
    "text, number",
    [
        ("The answer is 12.", "12"),
        ("first 7, then 8", "8"),
        ("it costs $1,234.50.", "1234.5"),
        ("+5", "5"),
        ("-0", "0"),
        ("12.0", "12"),
        ("x = -37", "-37"),
        ("10-3", "3"),
        ("(4)-3", "3"),
        ("5 - 3", "3"),
        ("about -.5", "-0.5"),
        ("\u22124", "-4"),
        ("1,2,3", "3"),
        ("12,345,678", "12345678"),
        ("1,2345", "2345"),
        ("7,", "7"),
        ("007", "7"),
        ("\u0663 or 4", "4"),
        ("1.2.3", "0.3"),
    ],
)
def test_the_last_number_is_read_as_a_person_would(text, number):
    assert last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none", "\u0663", "-", "$", ",", "."])
def test_a_text_without_a_number_is_wrong_and_never_equals_another_one(text):
    assert last_number(text) is None
    assert KINDS["last_number"](text, text) == 0.0


def test_numbers_are_compared_exactly_not_as_floats():
    assert KINDS["last_number"]("10000000000000001", "10000000000000000") == 0.0
    assert KINDS["last_number"]("0.1", "0.10") == 1.0


@pytest.mark.timeout(5)
@pytest.mark.parametrize("unit", ["1,", "1,111,", "-", "+1", "1.", "$,", "9"])
def test_a_hundred_thousand_characters_take_no_time(unit):
    KINDS["last_number"](unit * (100_000 // len(unit)), "1")


def test_exact_forgives_blanks_around_the_text_and_nothing_else():
    score = KINDS["exact"]
    assert score(" -12\n", "-12") == 1.0
    assert score("-12.", "-12") == 0.0
    assert score("- 12", "-12") == 0.0


@pytest.mark.parametrize(
    "text, answer, score",
    [
        ("The answer is \\boxed{\\frac{2}{4}}", "\\frac{1}{2}", 1.0),
        ("so it is 12.", "12", 1.0),
        ("\\boxed{12}", "$12$", 1.0),
        ("\\boxed{7}, not 12", "12", 0.0),
        ("I think 4 but no, 3", "3", 1.0),
        ("$(x+1)^2$", "x^2+2x+1", 1.0),
        ("\\boxed{\\{3, 1, 2\\}}", "\\{1,2,3\\}", 1.0),
        ("50%", "0.5", 1.0),
        ("seven", "7", 0.0),
        ("", "7", 0.0),
        ("filler " * 20_000 + "\\boxed{12}", "12", 1.0),
    ],
)
def test_math_compares_values_not_spellings(text, answer, score):
    assert KINDS["math"](text, answer) == score


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
