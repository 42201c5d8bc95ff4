"""The reader follows imports and bases as Python does, and says what is gone."""

import zipfile
from pathlib import Path

import pytest

from tests.contracts.relied_on import Row, missing
from tests.contracts.source import Gone, Sources

FILES = {
    "p/__init__.py": "from .a import *\nfrom .b import Renamed as Known\nimport torch\n",
    "p/a.py": (
        "try:\n    import fast\nexcept ImportError:\n    fast = None\n"
        "def call(x, *, y=1): ...\n"
        "def anything(**rest): ...\n"
        "class Base:\n"
        "    limit: int = 3\n"
        "    def __init__(self, size):\n"
        "        self.first, self.second = size, size\n"
        "    def act(self): ...\n"
    ),
    "p/b.py": (
        "from dataclasses import dataclass\nfrom p import a\n"
        "class Renamed(a.Base): ...\n"
        "@dataclass\nclass Fields:\n    one: int\n    two: int = 2\n"
        "@dataclass\nclass More(Fields):\n    three: int = 3\n"
        'PLACES = ("/generate", "/health")\n'
    ),
}


@pytest.fixture
def sources(tmp_path) -> Sources:
    wheel = Path(tmp_path / "p-1.whl")
    with zipfile.ZipFile(wheel, "w") as file:
        for name, text in FILES.items():
            file.writestr(name, text)
    return Sources(wheel)


@pytest.mark.parametrize(
    "path, takes",
    [
        ("p.call", {"x", "y"}),
        ("p.a.anything", {"**"}),
        ("p.Known", {"self", "size"}),
        ("p.Known.act", {"self"}),
        ("p.b.More", {"one", "two", "three"}),
    ],
)
def test_arguments_are_found_through_imports_and_bases(sources, path, takes):
    assert sources.arguments(sources.find(path)) == takes


@pytest.mark.parametrize("path", ["p", "p.a.fast", "p.Base.limit"])
def test_so_are_modules_and_names(sources, path):
    sources.find(path)


@pytest.mark.parametrize(
    "path, gone",
    [
        ("p.c", "c is not in p"),
        ("q.a", "there is no module q.a"),
        ("p.Known.third", "third is not in p.b.Renamed"),
        ("p.a.Base.act.inner", "inner is not in p.a.act"),
    ],
)
def test_what_is_gone_is_named(sources, path, gone):
    with pytest.raises(Gone, match=gone):
        sources.find(path)


def test_a_row_says_what_a_release_lacks(sources):
    assert missing(Row("p", "p.call", takes="x z"), sources) == "p.call has no z"
    assert missing(Row("p", "p.anything", takes="z"), sources) == ""
    assert missing(Row("p", "p", says="/generate one second"), sources) == ""
    assert missing(Row("p", "p.b", says="/load"), sources) == "p.b has no /load"
    assert missing(Row("p", "p.Known.third"), sources) == "third is not in p.b.Renamed"
