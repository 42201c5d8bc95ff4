"""The one exception that means "the user can mend this": the CLI prints it and exits with 2."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


class ConfigError(ValueError):
    """Bad input from outside: a recipe, a checkpoint, a data file.

    The message is one sentence that names the key, file, tensor or shape, the value found, and the
    mend.
    """


class Unreadable(ConfigError):
    """The system cannot read a file, which says nothing about what is in it."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """
    Raises:
        Unreadable: the system cannot read the file; one that is missing is left to the caller.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unreadable(f"{path} cannot be read ({error.strerror})") from None
