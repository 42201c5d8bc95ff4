"""The pictures of docs/images: small, shown by a page, and drawn by ``make pictures``."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


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
