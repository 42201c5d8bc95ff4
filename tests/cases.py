"""Parameters of tests, some of which are left to ``--thorough``."""

from collections.abc import Iterable

import pytest


def all_but(cases: Iterable[str], *thorough: str) -> list:
    """All cases, of which ``thorough`` ones show in another setting what the rest shows."""
    cases = list(cases)
    assert set(thorough) <= set(cases), set(thorough) - set(cases)
    marks = {case: [pytest.mark.thorough] for case in thorough}
    return [pytest.param(case, marks=marks.get(case, ())) for case in cases]
