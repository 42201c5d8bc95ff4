"""Command lines that mix ``section.key=value`` with options, and answer a mistake in one
sentence."""

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import NoReturn

from qurl_megatron.kit.errors import printable
from qurl_megatron.kit.shipped import shipped

TAKERS = ("overrides", "words")  # arguments that take settings of the recipe


class Parser(argparse.ArgumentParser):
    """Exit with status 2 and one sentence that names the likely word."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else list(args)
        end = args.index("--") if "--" in args else len(args)
        self._words = args[:end]
        parsed, unparsed = super().parse_known_args(args, namespace)
        for word in unparsed:
            if word.startswith("-"):
                self.error(self._unknown(word))
        return parsed, unparsed

    def error(self, message: str) -> NoReturn:
        wrong = re.match(r"argument (.+): invalid choice: '(.*)' \(choose from (.*)\)", message)
        missing = re.match(r"the following arguments are required: (.*)", message)
        if wrong:
            argument, value, valid = wrong.groups()
            choices = re.findall(r"[^', ]+", valid)
            subject = f"{argument} cannot be {value!r}"
            if argument.isupper():  # a metavar, which stands for a command
                subject = f"there is no {argument.lower()} {value!r}"
            message = f"{subject}; there are {', '.join(choices)}"
            if close := get_close_matches(value.lower(), choices, n=1):
                message = f"{subject}; did you mean {close[0]}?"
        elif missing:
            message = f"missing: {missing[1]}; `{self.prog} --help` says what it takes"
            for word in self._words:
                if self._is_unknown(word):  # the missing one, misspelt
                    message = self._unknown(word)
        self.exit(2, printable(f"{self.prog}: {message}\n"))

    def _is_unknown(self, word: str) -> bool:
        name = word.partition("=")[0]
        is_option = any(option.startswith(name) for option in self._option_string_actions)
        return re.match("--?[a-zA-Z]", name) is not None and not is_option

    def _unknown(self, option: str) -> str:
        """Return the sentence for an option that this command does not have."""
        name, equals, value = option.partition("=")
        if not equals:
            value = "VALUE"
            for word, follower in pairwise(self._words):
                if word == option and not follower.startswith("-"):
                    value = follower
        if any(action.dest in TAKERS for action in self._actions):
            from qurl_megatron.config.load import keys_like  # only for a mistake

            if keys := keys_like(name.lstrip("-").replace("-", "_")):
                meant = " or ".join(f"{key}={value}" for key in keys)
                return f"there is no option {name}; a setting has no dashes: {meant}"
        options = re.findall(r"--[\w-]+", self.format_usage())
        if close := get_close_matches(name, options, n=1):
            return f"there is no option {name}; did you mean {close[0]}?"
        hint = f"`{self.prog} --help` lists them"
        if any(action.dest == "words" for action in self._actions):
            hint = "if it belongs to a --kind command, write `--` before that command"
        return f"there is no option {name}; {hint}"


def parse(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments; argparse by itself wants all settings side by side.

    Words behind an option go to ``overrides``, or to the ``words`` of a batch job.
    """
    arguments, unparsed = parser.parse_known_args(argv)
    if not unparsed:
        return arguments
    for name in TAKERS:
        if hasattr(arguments, name):
            setattr(arguments, name, [*getattr(arguments, name), *unparsed])
            return arguments
    command = f"{parser.prog} {getattr(arguments, 'command', '')}".strip()
    parser.error(f"unexpected: {' '.join(unparsed)}; `{command} --help` says what it takes")


def add_recipe(command: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """Add a recipe and its settings to a command."""
    command.add_argument(
        "recipe",
        type=lambda text: shipped(text, "launch/recipes"),
        nargs=nargs,
        help="TOML recipe, or the name of one that ships, such as quickstart",
    )
    add_overrides(command, "e.g. quant.scheme=fp8")


def add_overrides(command: argparse.ArgumentParser, help: str) -> None:
    """Add settings of the recipe to a command."""
    command.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help=help)
