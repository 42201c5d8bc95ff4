"""Code of the user's own that a recipe names: found and checked, and watched while a run goes on.

Importing a module runs it, so rewards and environments are found in workers alone.

Unlike data, code may change under a run: a user who fixes a reward goes on from the checkpoint.
But its new scores are not compared with earlier ones. Files alone are watched: neither their
imports, nor a server behind a URL.
"""

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from qurl_megatron.data.rows import checksum_of
from qurl_megatron.kit.errors import ConfigError


def find_named(setting: str, kind: Literal["function", "class"]) -> Callable[..., Any]:
    """Return the function or the class of a name.

    Args:
        setting: key, of the recipe or the option, and name, "package.module:name" or
            "path/to/file.py:name", as key=name.

    Raises:
        ConfigError: there is none.
    """
    target, _, attribute = setting.partition("=")[2].rpartition(":")
    module = _module(setting, target)
    named_object = getattr(module, attribute, None)
    own_names = []
    for own_name, value in vars(module).items():
        made_there = getattr(value, "__module__", None) == module.__name__  # not only imported
        fitting = callable(value) and inspect.isclass(value) == (kind == "class")
        if made_there and fitting and not own_name.startswith("_"):
            own_names.append(own_name)
    contents = f"it has {', '.join(own_names) or f'no {kind}'}"
    if named_object is None:
        close = get_close_matches(attribute, own_names, n=1)
        hint = f"did you mean {close[0]}?" if close else contents
        raise ConfigError(f"{setting}: {target} has no {attribute}; {hint}")
    if callable(named_object) and inspect.isclass(named_object) == (kind == "class"):
        return named_object
    actual_kind = f"value of type {type(named_object).__name__}"
    if callable(named_object):
        actual_kind = "function" if kind == "class" else "class"
    raise ConfigError(f"{setting} is a {actual_kind}; name a {kind} ({contents})")


def check_call(
    function: Callable[..., Any], named: str, call: str, parameters: Sequence[str]
) -> None:
    """Raise ``ConfigError`` where a function cannot be called with these parameters by name.

    Args:
        call: name of the function in messages.
    """
    try:
        inspect.signature(function).bind(**dict.fromkeys(parameters))
    except ValueError:
        pass  # some of those written in C tell no signature; the first call will
    except TypeError as error:
        call_of = ", ".join(f"{parameter}=..." for parameter in parameters)
        raise ConfigError(
            f"{named} cannot be called as {call}({call_of}): {error}; give it these parameters, "
            "or **others for those it does not use"
        ) from None


def _module(named: str, target: str) -> ModuleType:
    try:
        if target.endswith(".py"):
            return _module_of_file(Path(target))
        return importlib.import_module(target)
    except FileNotFoundError as error:
        if error.filename != target:
            raise ConfigError(f"{named} cannot be imported: {last_line(error)}") from None
        raise ConfigError(
            f"{named}: {target} does not exist; a relative path begins at the recipe's folder, or "
            "in qurl eval at the working folder"
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


def last_line(error: BaseException) -> str:
    """Return the last line of a traceback, with the file and line it came from."""
    message = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(__file__).parents[1])
    for frame in reversed(frames):
        if not frame.filename.startswith(package) and "importlib" not in frame.filename:
            return f"{message} ({Path(frame.filename).name}, line {frame.lineno})"
    return message


def checksums(names: Iterable[str]) -> dict[str, str]:
    """Return the checksums of code named "file.py:name" or "package.module:name", by these names;
    skip empty names and files that cannot be read."""
    sums = {}
    for name in filter(None, names):
        path = _file_of(name)
        if path and path.is_file() and os.access(path, os.R_OK):
            sums[name] = checksum_of(path)
    return sums


def _file_of(name: str) -> Path | None:
    """Return the file of "file.py:name" or "package.module:name", found without running it:
    importing a module, or its package, is for workers alone."""
    target = name.rpartition(":")[0]
    if target.endswith(".py"):
        return Path(target)
    top, *inner = target.split(".")
    # A worker looks in the working folder first.
    spec = PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # Not by its whole name, for which a folder without __init__.py looks up its parents.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin)
