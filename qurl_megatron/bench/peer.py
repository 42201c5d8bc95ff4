"""Where peers' ways of doing things are: ``benchmarks/peers`` of a checkout, which no wheel has."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from qurl_megatron.errors import ConfigError

ROOT = Path(__file__).parents[2]


def checkout(what: str, without: str = "") -> Path:
    """The root of the checkout that this package is run from.

    Args:
        what: the file or folder that a benchmark needs, relative to the root.
        without: how to run the benchmark without it, for the error.

    Raises:
        ConfigError: an installed wheel runs, which has no such thing.
    """
    if not (ROOT / what).exists():
        raise ConfigError(
            f"{what} is not in the installed package: run this benchmark in a checkout of the "
            f"repository, by `python -m qurl_megatron.cli bench ...` at its root{without}"
        )
    return ROOT


def peer(name: str) -> ModuleType:
    """The module ``benchmarks.peers.NAME``.

    Raises:
        ConfigError: as of ``checkout``.
    """
    root = str(checkout(f"benchmarks/peers/{name}.py"))
    if root not in sys.path:
        sys.path.insert(0, root)  # where another package of this name is installed, ours is meant
    return import_module(f"benchmarks.peers.{name}")
