"""Call a command of ``qurl`` in this process."""

from qurl_megatron.cli import main


def tool(name: str, *arguments: object) -> int:
    """Return its exit code."""
    return main([name, *map(str, arguments)])
