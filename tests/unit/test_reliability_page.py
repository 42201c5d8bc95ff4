"""Each drill of docs/reliability.md names a test that is there, and only one."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reliability.md"


def cells() -> list[str]:
    """What the page's tables have under "test"."""
    found, last = [], ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            last = ""
            continue
        cell = line.strip("| ").rpartition(" | ")[2]
        last = last or cell  # of the header
        if last == "test":
            found.append(cell)
    return found


def named(cell: str) -> list[tuple[str, str]]:
    """The tests of a cell: files, each with the patterns after it."""
    one = r"`(\w+/\w+\.py)`((?:[:,] `\w+`)+)"
    assert "`" not in re.sub(one, "", cell), f"{cell} is not `file`: `pattern`, `pattern`; ..."
    return [
        (file, pattern)
        for file, patterns in re.findall(one, cell)
        for pattern in re.findall(r"\w+", patterns)
    ]


def test_every_drill_names_exactly_one_test():
    drills = {drill for cell in cells() for drill in named(cell)}
    assert len(drills) > 50, "the tables are found"
    for file, pattern in sorted(drills):
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        names = re.findall(r"^ *def (test_\w+)", text, re.MULTILINE)
        found = [name for name in names if pattern in name]
        assert len(found) == 1, f"{file}: {pattern} names {found}"
