"""Waiting in vain tells for what."""

import functools

import pytest

from tests.waiting import wait_until


def test_what_never_came_to_be_is_named():
    engines = []
    with pytest.raises(AssertionError, match=r"never within 0 s: .*len\(engines\) == 2"):
        wait_until(lambda: len(engines) == 2, seconds=0)
    with pytest.raises(AssertionError, match="partial.*bool"):
        wait_until(functools.partial(bool, 0), seconds=0)
