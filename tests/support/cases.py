"""Parameters of tests, some of which are left to ``--thorough``."""

from collections.abc import Collection, Iterable

import pytest


def all_but(cases: Iterable[str], *thorough: str, nccl: Collection[str] | None = None) -> list:
    """All cases, of which ``thorough`` ones show in another setting what the rest shows.

    Args:
        nccl: those that suffice over NCCL; None for all.
    """
    cases = list(cases)
    assert {*thorough, *(nccl or ())} <= set(cases), {*thorough, *(nccl or ())} - set(cases)
    found = []
    for case in cases:
        marks = [pytest.mark.thorough] if case in thorough else []
        if nccl is not None and case not in nccl:
            marks.append(pytest.mark.thorough("nccl"))
        found.append(pytest.param(case, marks=marks))
    return found
