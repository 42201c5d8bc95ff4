"""The soft overlong punishment against DAPO's Eq. 13, worked by hand."""

import pytest

from qurl_megatron.rewards import overlong_penalty


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (17408, -0.25), (20480, -1.0), (30000, -1.0)],
)
def test_it_falls_over_the_last_fifth_as_in_the_paper(length, expected):
    # L_max = 20480 and L_cache = 4096: (16384 - length) / 4096 in between.
    assert overlong_penalty(length, 20480, 0.2, 1.0) == pytest.approx(expected, abs=1e-12)


def test_its_depth_is_scaled_and_a_fraction_of_zero_turns_it_off():
    assert overlong_penalty(75, 100, 0.5, 0.6) == pytest.approx(-0.3)
    assert overlong_penalty(100, 100, 0.0, 1.0) == 0.0


def test_a_fraction_of_one_falls_from_the_first_token_on():
    assert overlong_penalty(1, 4, 1.0, 1.0) == pytest.approx(-0.25)
