"""The page for developers names files, commands and calls that there are."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/developing.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([^`\n]+)`", PAGE)


def test_files_that_the_page_names_are_there():
    paths = {path for code in CODE for path in re.findall(r"^[\w./]+/[\w.]*", code)}
    paths = {path for path in paths if "NEW" not in path and not path.startswith(("/", "RUN_DIR"))}
    assert len(paths) > 40
    places = (ROOT, ROOT / "qurl_megatron")
    assert not [path for path in paths if not any((place / path).exists() for place in places)]


def paragraph(about: str) -> str:
    """The paragraph of the page that begins with these words in bold."""
    return PAGE.split(f"\n**{about}**")[1].partition("\n\n")[0]


@pytest.mark.parametrize(
    ("about", "asks"),
    [
        ("A transport", r"(\btransport (==|in|not in|!=) |transport=\"\w|match .*transport)"),
        ("A loss with a number of its own", r"\bobjective (==|in|not in|!=) "),
    ],
)
def test_files_that_ask_for_one_by_its_name_are_named(about, asks):
    package = ROOT / "qurl_megatron"
    files = [path.relative_to(package) for path in sorted(package.rglob("*.py"))]
    asking = [
        str(path)
        for path in files
        if path.parts[0] != "wire" and re.search(asks, (package / path).read_text())
    ]
    assert asking and not [path for path in asking if f"`{path}`" not in paragraph(about)]


def test_commands_that_the_page_names_are_targets():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {code.split()[1] for code in CODE if code.startswith("make ")}
    assert len(named) > 8 and named <= targets


def test_the_quickstart_ends_by_saying_how_qurl_is_called_as_readme_does():
    dry = ["make", "--no-print-directory", "--dry-run", "quickstart", "PYTHON=python3.12"]
    apart = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    done = subprocess.run(dry, cwd=ROOT, env=apart, capture_output=True, text=True, check=True)
    lines = done.stdout
    *_, last = lines.splitlines()
    printed = subprocess.run(["sh", "-c", last], capture_output=True, text=True).stdout
    for text, folder in ((printed, ".venv-python3.12"), (README.replace("`", ""), ".venv")):
        assert f"source {folder}/bin/activate" in text and f"call {folder}/bin/qurl" in text


def test_names_of_code_that_the_page_gives_are_defined():
    sources = "\n".join(path.read_text() for path in (ROOT / "qurl_megatron").rglob("*.py"))
    names = {code.rpartition(":")[2].rpartition(".")[2] for code in CODE}
    names = {name for name in names if re.fullmatch(r"[A-Z][A-Za-z]+[a-z]|[a-z]+_[a-z_]+", name)}
    assert len(names) > 12
    names -= {"Literal"}  # Python's
    lacking = [n for n in sorted(names) if not re.search(rf"\b(class|def) {n}\b", sources)]
    assert not lacking
