"""Every name and argument relied on is in every release that is supported; ``make contracts``."""

from functools import cache

import pytest

from tests.contracts.relied_on import ROWS, missing
from tests.contracts.source import Sources
from tests.contracts.wheels import RELEASES, Release


@cache
def sources(release: Release) -> Sources:
    wheel = release.wheel()
    if wheel is None:
        pytest.skip(f"{release} is not in .contracts: `make contracts` downloads it")
    return Sources(wheel)


@pytest.mark.parametrize("release", RELEASES, ids=str)
def test_a_release_has_what_is_relied_on(release):
    found = sources(release)
    rows = [row for row in ROWS if row.package == release.package]
    assert rows
    gone = [what for row in rows if (what := missing(row, found))]
    assert not gone, f"{release}: " + "; ".join(gone)
