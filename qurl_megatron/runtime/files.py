"""Files that another node has written: network file systems show them late."""

import contextlib
import os
import socket
import time
from pathlib import Path

from qurl_megatron.errors import ConfigError

CACHED_S = 90.0
"""Seconds to wait for a file; NFS caches directories for up to 60."""


def wait_until_seen(path: Path, why: str, *, key: str, seconds: float = CACHED_S) -> None:
    """Return once this node sees ``path``, which another one has.

    Args:
        why: that the other has it, for the message.
        key: of the recipe, whose folder has to be shared.

    Raises:
        ConfigError: it has not come to be seen.
    """
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{path} is not to be seen on {socket.gethostname()} after {seconds:g} s, and "
                f"{why}; set {key} to a folder that all nodes share"
            )
        # A name that was looked up in vain is cached too; to list the folders asks the server anew.
        for folder in path.parents[:3]:
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                next(entries, None)
        time.sleep(0.5)
