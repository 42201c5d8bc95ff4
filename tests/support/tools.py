"""Call a script of checkpoints_tools/ in this process."""

import importlib


def tool(name: str, *arguments: object) -> int:
    """Return its exit code."""
    return importlib.import_module(f"checkpoints_tools.{name}").main([str(a) for a in arguments])
