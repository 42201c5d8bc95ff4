"""What counts as the right answer."""

from decimal import Decimal

import pytest

from qurl_megatron.rewards.verifiers import KINDS, last_number


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
