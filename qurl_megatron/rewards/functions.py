"""The user's rewards: found by name, checked before the run, called, and their scores checked.

Importing a module runs it, so this runs in workers alone.
"""

import importlib
import importlib.util
import inspect
import itertools
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from qurl_megatron.kit.errors import ConfigError, unscored
from qurl_megatron.rewards.item import Item, Score, as_score

FIELDS = ("prompt", "response", "answer", "metadata")
CALLED = "prompt=..., response=..., answer=..., metadata=..."

Function = Callable[..., Any]


@dataclass(frozen=True)
class Named:
    """A callable that a recipe names."""

    found: Function
    named: str  # by the recipe
    instead: str  # "name a class (it has Tool)"

    def other_kind(self) -> ConfigError:
        """Return the error that the recipe names the wrong kind of thing."""
        kind = "class" if inspect.isclass(self.found) else type(self.found).__name__
        return ConfigError(f"{self.named} is a {kind}; {self.instead}")


def find_named(key: str, name: str, what: str) -> Named:
    """
    Args:
        key: of the recipe, or the option, that names it; for messages.
        name: "package.module:name" or "path/to/file.py:name".
        what: the expected kind, "function" or "class", for messages.

    Raises:
        ConfigError: there is none.
    """
    target, _, attribute = name.rpartition(":")
    module = _module(f"{key}={name}", target)
    named_object = getattr(module, attribute, None)
    own_names = []
    for own_name, value in vars(module).items():
        made_there = getattr(value, "__module__", None) == module.__name__  # not only imported
        fitting = callable(value) and inspect.isclass(value) == (what == "class")
        if made_there and fitting and not own_name.startswith("_"):
            own_names.append(own_name)
    contents = f"it has {', '.join(own_names) or f'no {what}'}"
    if named_object is None:
        close = get_close_matches(attribute, own_names, n=1)
        hint = f"did you mean {close[0]}?" if close else contents
        raise ConfigError(f"{key}={name}: {target} has no {attribute}; {hint}")
    instead = f"name a {what} ({contents})"
    if not callable(named_object):
        raise ConfigError(
            f"{key}={name} is of type {type(named_object).__name__} and cannot be called; {instead}"
        )
    return Named(named_object, f"{key}={name}", instead)


def find_function(key: str, name: str) -> Function:
    """Return the reward of that name, found as by ``find_named``.

    Raises:
        ConfigError: there is none, or it cannot be called as rewards are.
    """
    named = find_named(key, name, "function")
    function = named.found
    if inspect.isclass(function):
        raise named.other_kind()
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{key}={name} is an async function; name one that returns its score")
    check_call(function, f"{key}={name}", name.rpartition(":")[2], CALLED)
    return function


def check_call(function: Function, named: str, call: str, parameters: str) -> None:
    """
    Args:
        call: the call's shape for messages, with ``parameters``, "a=..., b=...".

    Raises:
        ConfigError: it cannot be called with them.
    """
    names = [parameter.partition("=")[0] for parameter in parameters.split(", ")]
    try:
        inspect.signature(function).bind(**dict.fromkeys(names))
    except ValueError:
        pass  # some of those written in C tell no signature; the first call will
    except TypeError as error:
        raise ConfigError(
            f"{named} cannot be called as {call}({parameters}): {error}; give it these "
            "parameters, or **others for those it does not use"
        ) from None


def _module(named: str, target: str) -> ModuleType:
    try:
        if target.endswith(".py"):
            return _module_of_file(Path(target))
        return importlib.import_module(target)
    except FileNotFoundError as error:
        if error.filename != target:
            raise ConfigError(f"{named} cannot be imported: {last_line(error)}") from None
        begins = "the working folder" if named.startswith("--") else "the recipe's folder"
        raise ConfigError(
            f"{named}: {target} does not exist; a relative path begins at {begins}"
        ) from None
    except SyntaxError as error:
        raise ConfigError(
            f"{named} cannot be imported: {error.filename}, line {error.lineno}: {error.msg}"
        ) from None
    except BaseException as error:  # importing runs it: whatever it does
        raise ConfigError(
            f"{named} cannot be imported: {last_line(error)}; fix it, or have PYTHONPATH lead to "
            "what it needs"
        ) from None


def _module_of_file(path: Path) -> ModuleType:
    """Import a file, which finds others beside it after all that is installed."""
    spec = importlib.util.spec_from_file_location(f"qurl_own_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "of a file that ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def call(function: Function, items: Sequence[Item], *, batched: bool) -> list[Score]:
    """Return the scores of some responses; where a batched call fails, its halves are called.

    So one response that breaks the function costs the others nothing.
    """
    try:
        if batched:
            arguments = {name: [getattr(item, name) for item in items] for name in FIELDS}
            values = list(itertools.islice(function(**arguments), len(items) + 1))
        else:
            values = [function(**{name: getattr(item, name) for name in FIELDS}) for item in items]
        scores = [_as_score(value) for value in values]  # which may run code of the value's own
    except BaseException as error:  # sys.exit() is no reason to end, either
        failure = unscored("exceptions", last_line(error))
    else:
        if len(scores) == len(items):
            return scores
        count = "more" if len(scores) > len(items) else len(scores)
        failure = unscored("invalid", f"{count} scores for {len(items)} responses")
    if len(items) == 1:
        return [failure]
    half = len(items) // 2
    first = call(function, items[:half], batched=batched)
    return first + call(function, items[half:], batched=batched)


def _as_score(value: Any) -> Score:
    """Return a value as a score; verl's dicts hold the score among other values that verl logs."""
    if not isinstance(value, dict):
        return as_score(value)
    if "score" not in value:
        return unscored("invalid", "a dict without a 'score'")
    return as_score(value["score"])


def last_line(error: BaseException) -> str:
    """Return the last line of a traceback, with the file and line it came from."""
    message = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parents[1])
    for frame in reversed(frames):
        if not frame.filename.startswith(ours) and "importlib" not in frame.filename:
            return f"{message} ({Path(frame.filename).name}, line {frame.lineno})"
    return message
