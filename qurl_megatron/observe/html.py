"""Pages of one file, which open without a network; all look alike."""

from pathlib import Path
from typing import Any

import jinja2

from qurl_megatron.kit.errors import printable

HERE = Path(__file__).parent


def page(template: Path, **values: Any) -> str:
    """
    Args:
        template: extends ``base.html``.
        values: what it shows; ``name`` heads the page, with ``facts`` below.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, HERE]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    css = (HERE / "report.css").read_text(encoding="utf-8")
    return printable(environment.get_template(template.name).render(css=css, **values))
