"""What is left to ``--thorough``: most combinations of crossed cases, and tests marked so.

Besides, Ctrl-C is heard wherever the tests run, and a key that one test uses is an ordinary word
for the others.
"""

import signal
from collections import Counter

import pytest

from qurl_megatron.kit import errors


@pytest.fixture(autouse=True)
def keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """``kit.errors.printable`` leaves keys out while the process lives; here, for a test."""
    monkeypatch.setattr(errors, "_SECRETS", {})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help="run every combination of tests marked crossed, and tests marked thorough",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts its background jobs with SIGINT ignored, and so would be every process that
    # tests start, although some interrupt theirs. What has a handler begins anew with the default.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--thorough"):
        return
    crossed: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("crossed"):
            crossed.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = {item for cases in crossed.values() for item in set(cases) - covering(cases)}
    left_out |= {item for item in items if repeats(item)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def repeats(item: pytest.Item) -> bool:
    """Marked thorough; or for a backend, which is the one that it runs on."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return any(
        not mark.args or params.get("backend") in mark.args
        for mark in item.iter_markers("thorough")
    )


def covering(cases: list[pytest.Item]) -> set[pytest.Item]:
    """Few of the cases in which each parametrize still takes each of its values."""
    # One id per parametrize; pytest has them joined in public, and ids may contain the joint.
    values = {case: set(enumerate(case.callspec._idlist)) for case in cases}
    missing = set().union(*values.values())
    chosen: set[pytest.Item] = set()
    used: Counter = Counter()
    while missing:
        # The most that is new; among equals, what has been used least.
        best = max(
            cases,
            key=lambda case: (len(missing & values[case]), -sum(used[v] for v in values[case])),
        )
        chosen.add(best)
        used.update(values[best])
        missing -= values[best]
    return chosen


@pytest.fixture
def hears_hangups():
    """Under nohup the tests ignore them, and what they start would do so, too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
