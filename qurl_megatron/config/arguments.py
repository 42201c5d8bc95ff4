"""Command lines that mix ``section.key=value`` with options, and answer a mistake in one
sentence."""

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from qurl_megatron.kit.errors import printable

TAKERS = ("overrides", "words")  # arguments that take settings of the recipe


class Parser(argparse.ArgumentParser):
    """Exit with status 2 and one sentence that names the likely word.

    Options may be written with underscores for dashes, as torchrun's may.
    """

    _given: Sequence[str] = ()

    def parse_known_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else list(args)
        end = args.index("--") if "--" in args else len(args)
        self._given = args[:end] = [self._with_dashes(word) for word in args[:end]]
        parsed, unparsed = super().parse_known_args(args, namespace)
        if unknown := next((word for word in unparsed if word.startswith("-")), None):
            self.error(self._unknown(unknown))
        return parsed, unparsed

    def error(self, message: str) -> NoReturn:
        if wrong := re.match(
            r"argument (.+): invalid choice: '(.*)' \(choose from (.*)\)", message
        ):
            argument, value, valid = wrong.groups()
            choices = re.findall(r"[^', ]+", valid)
            close = get_close_matches(value.lower(), choices, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(choices)}"
            command = f"there is no {argument.lower()} {value!r}"
            is_metavar = argument.isupper()  # stands for a command
            message = f"{command if is_metavar else f'{argument} cannot be {value!r}'}; {hint}"
        elif missing := re.match(r"the following arguments are required: (.*)", message):
            message = f"missing: {missing[1]}; `{self.prog} --help` says what it takes"
            if unknown := next((word for word in self._given if self._is_unknown(word)), None):
                message = self._unknown(unknown)  # the missing one may be there, misspelt
        self.exit(2, printable(f"{self.prog}: {message}\n"))

    def _with_dashes(self, word: str) -> str:
        name, *value = re.split("(=)", word, maxsplit=1)
        dashed = name.replace("_", "-")
        return "".join([dashed, *value]) if dashed in self._option_string_actions else word

    def _is_unknown(self, word: str) -> bool:
        name = word.partition("=")[0]
        is_option = any(option.startswith(name) for option in self._option_string_actions)
        return re.match("--?[a-zA-Z]", name) is not None and not is_option

    def _unknown(self, option: str) -> str:
        name, equals, value = option.partition("=")
        if not equals:
            behind = self._given[self._given.index(option) + 1 :] if option in self._given else []
            value = behind[0] if behind and not behind[0].startswith("-") else "VALUE"
        from qurl_megatron.config.load import keys_like  # only for a mistake

        takes = {action.dest for action in self._actions} & {*TAKERS}
        command = "words" in takes and any(word.startswith("--kind") for word in self._given)
        keys = keys_like(name.lstrip("-").replace("-", "_")) if takes and not command else []
        if keys:
            meant = " or ".join(f"{key}={value}" for key in keys)
            return f"there is no option {name}; a setting has no dashes: {meant}"
        options = re.findall(r"--[\w-]+", self.format_usage())
        close = get_close_matches(name, options, n=1, cutoff=0.8 if command else 0.6)
        hint = f"did you mean {close[0]}?" if close else f"`{self.prog} --help` lists them"
        if "words" in takes and not close:
            hint = "if it belongs to the command of a --kind, write `--` before that command"
        return f"there is no option {name}; {hint}"


def parse(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments; argparse by itself wants all settings side by side.

    Words behind an option go to ``overrides``, or to the ``words`` of a batch job.
    """
    arguments, unparsed = parser.parse_known_args(argv)
    if not unparsed:
        return arguments
    # Where settings of the recipe go, for commands that take some.
    taker = next((name for name in TAKERS if hasattr(arguments, name)), None)
    if taker is None:
        command = f"{parser.prog} {arguments.command}" if "command" in arguments else parser.prog
        parser.error(f"unexpected: {' '.join(unparsed)}; `{command} --help` says what it takes")
    setattr(arguments, taker, [*getattr(arguments, taker), *unparsed])
    return arguments
