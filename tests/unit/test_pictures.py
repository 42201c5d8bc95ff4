"""The pictures of docs/images: small, shown by a page, and drawn by ``make pictures``."""

import importlib.util
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def load_draw():
    spec = importlib.util.spec_from_file_location("draw", IMAGES / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


draw = load_draw()


def test_every_picture_is_small_and_on_a_page_and_the_command_draws_it():
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    command = (IMAGES / "draw.py").read_text(encoding="utf-8")
    pictures = [path for path in IMAGES.iterdir() if path.suffix in (".png", ".svg")]
    assert {path.name for path in pictures} == {
        "quickstart.png", "report.png", "report_phone.png", "terminal.svg",
    }  # fmt: skip
    for path in pictures:
        assert path.stat().st_size < 400_000
        assert f"images/{path.name})" in pages and f'"{path.name}"' in command, path.name


def test_a_terminal_shows_what_was_not_written_over():
    rows = draw.screen("one\r\n\x1b[36mtwo\x1b[0m 2 s\r\nthree\r\x1b[2K\x1b[1A\x1b[2Klast & <\r\n")
    assert ["".join(character for character, _ in row) for row in rows] == ["one", "last & <"]


def test_a_terminal_is_drawn_with_its_colours():
    rows = draw.screen("a \x1b[1;36mb\x1b[0m\x1b[38;2;1;2;3mc & <\x1b[0m")
    drawing = ElementTree.fromstring(draw.terminal_svg(rows))
    texts = [one for one in drawing.iter() if one.tag.endswith("text")]
    assert [one.text for one in texts] == ["a ", "b", "c & <"]
    assert texts[1].get("font-weight") == "bold" and texts[2].get("fill") == "#010203"
