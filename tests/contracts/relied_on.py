"""What this package relies on in packages that change under it: the rows of relied_on.toml.

``takes`` are arguments of a function or a constructor, ``says`` words that a module has as strings,
fields or attributes: endpoints, options. Both are written as words of one string.
"""

import inspect
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.contracts.source import Gone, Sources
from tests.support.transformer_engine import MODULES

BELOW = {
    "megatron-core": "megatron.core",
    "transformer-engine": "transformer_engine",
    "sglang": "sglang.srt",
    "nvidia-modelopt": "modelopt.torch",
}
"""Where the names of a package's rows begin."""


@dataclass(frozen=True)
class Row:
    package: str
    path: str
    takes: str = ""
    says: str = ""


def _written() -> list[Row]:
    rows = []
    for package, table in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items():
        says = table.pop("says", {})
        below = BELOW[package]
        rows += [Row(package, f"{below}.{name}", takes=words) for name, words in table.items()]
        rows += [Row(package, f"{below}.{name}", says=words) for name, words in says.items()]
    return rows


def _stand_in() -> list[Row]:
    """All that the tests' stand-in has, with the arguments it takes."""
    rows = []
    for module, content in MODULES.items():
        rows.append(Row("transformer-engine", module))
        for source, name in content:
            entry, takes = getattr(source, name), []
            if inspect.isfunction(entry) or "__init__" in vars(entry):
                for parameter in inspect.signature(entry).parameters.values():
                    if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                        takes.append(parameter.name)
            rows.append(Row("transformer-engine", f"{module}.{name}", " ".join(takes)))
    return rows


ROWS = [*_written(), *_stand_in()]


def missing(row: Row, found: Sources) -> str:
    """What a release lacks of a row; empty where it has all."""
    try:
        if row.says:
            lacking = set(row.says.split()) - found.says(row.path)
        else:
            place = found.find(row.path)
            lacking = set(row.takes.split())
            if lacking:
                taken = found.arguments(place)
                lacking = lacking - taken if "**" not in taken else set()
    except Gone as gone:
        return str(gone)
    if not lacking:
        return ""
    return f"{row.path} has no {', '.join(sorted(lacking))}"
