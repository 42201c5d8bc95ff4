"""Command lines in which ``section.key=value`` may stand before, behind and among the options, and
whose mistakes are one sentence."""

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Leaves with status 2 and one sentence, with what was probably meant."""

    def parse_known_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else list(args)
        found, rest = super().parse_known_args(args, namespace)
        if unknown := next((word for word in rest if word.startswith("-")), None):
            behind = args[args.index(unknown) + 1 :] if unknown in args else []
            self.error(self._unknown(unknown, behind, settings=_taker(found) is not None))
        return found, rest

    def error(self, message: str) -> NoReturn:
        if wrong := re.match(
            r"argument (.+): invalid choice: '(.*)' \(choose from (.*)\)", message
        ):
            what, given, there = wrong.groups()
            choices = re.findall(r"[^', ]+", there)
            close = get_close_matches(given, choices, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(choices)}"
            command = f"there is no {what.lower()} {given!r}"  # what is in capitals stands for one
            message = f"{command if what.isupper() else f'{what} cannot be {given!r}'}; {hint}"
        elif missing := re.match(r"the following arguments are required: (.*)", message):
            message = f"missing: {missing[1]}; `{self.prog} --help` says what it takes"
        self.exit(2, f"{self.prog}: {message}\n")

    def _unknown(self, option: str, behind: Sequence[str], *, settings: bool) -> str:
        name, equals, value = option.partition("=")
        if not equals:
            value = behind[0] if behind and not behind[0].startswith("-") else "VALUE"
        from qurl_megatron.config.load import keys_like  # only for a mistake

        if settings and (keys := keys_like(name.lstrip("-").replace("-", "_"))):
            meant = " or ".join(f"{key}={value}" for key in keys)
            return f"there is no option {name}; a setting has no dashes: {meant}"
        close = get_close_matches(name, re.findall(r"--[\w-]+", self.format_usage()), n=1)
        hint = f"did you mean {close[0]}?" if close else f"`{self.prog} --help` lists them"
        return f"there is no option {name}; {hint}"


def parse(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; argparse by itself takes a list of words in one piece alone.

    What stands behind an option goes to ``overrides``, or to the ``words`` of a batch job.
    """
    arguments, rest = parser.parse_known_args(argv)
    taker = _taker(arguments)
    if rest and taker is None:
        command = f"{parser.prog} {arguments.command}" if "command" in arguments else parser.prog
        parser.error(f"unexpected: {' '.join(rest)}; `{command} --help` says what it takes")
    if rest:
        setattr(arguments, taker, [*getattr(arguments, taker), *rest])
    return arguments


def _taker(arguments: argparse.Namespace) -> str | None:
    """Where settings of the recipe go, for commands that take some."""
    return next((name for name in ("overrides", "words") if hasattr(arguments, name)), None)
