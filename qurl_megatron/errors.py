"""The one exception that means "the user can mend this": the CLI prints it and exits with 2."""


class ConfigError(ValueError):
    """Bad input from outside: a recipe, a checkpoint, a data file.

    The message is one sentence that names the key, file, tensor or shape, the value found, and the
    mend.
    """
