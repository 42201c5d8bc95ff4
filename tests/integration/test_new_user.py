"""Mistakes of somebody's first hour: one sentence with the thing and the mend, exit code 2."""

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from qurl_megatron.cli import main
from tests.support.mistakes import MISTAKES, Mistake, mistaken


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory) -> Iterator[dict[str, Mistake]]:
    root = tmp_path_factory.mktemp("new_user")
    with mistaken(root) as mistakes, contextlib.chdir(root):
        yield {mistake.name: mistake for mistake in mistakes}


@pytest.mark.parametrize("name", [one.name for one in MISTAKES])
def test_a_mistake_is_one_sentence_that_names_the_thing_and_the_mend(name, mistakes, capsys):
    mistake = mistakes[name]
    before = files()
    try:
        code = main(shlex.split(mistake.command))
    except SystemExit as exit:
        code = exit.code
    message = capsys.readouterr().err
    assert code == 2, message
    assert message.count("\n") == 1 and message.startswith("qurl"), message
    assert mistake.thing in message and mistake.mend in message, message
    assert files() == before


def files() -> dict[Path, int]:
    """Return the sizes of all files in the working folder but Python's compiled ones."""
    paths = [path for path in Path().rglob("*") if "__pycache__" not in path.parts]
    return {path: path.stat().st_size for path in paths}
