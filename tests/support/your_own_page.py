"""docs/your_own.md as its tests read it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/your_own.md").read_text(encoding="utf-8")
FILES = ["mine/make_data.py", "mine/rewards.py", "mine/recipe.toml", "mine/ask.py"]
"""In the order in which the page has them."""


def blocks(*languages: str) -> list[str]:
    """Return the page's code blocks in these languages."""
    return re.findall(rf"```(?:{'|'.join(languages)})\n(.*?)```", PAGE, re.DOTALL)
