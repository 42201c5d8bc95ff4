"""Command lines in which ``section.key=value`` may stand before, behind and among the options."""

import argparse
from collections.abc import Sequence


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; argparse by itself takes a list of words in one piece alone.

    What stands behind an option goes to ``overrides``, or to the ``words`` of a batch job.
    """
    arguments, rest = parser.parse_known_args(argv)
    taker = next((name for name in ("overrides", "words") if hasattr(arguments, name)), None)
    if rest and (taker is None or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        setattr(arguments, taker, [*getattr(arguments, taker), *rest])
    return arguments
