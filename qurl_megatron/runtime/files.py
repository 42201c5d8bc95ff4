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
        why: what shows that the other has it, for the message.
        key: recipe key of the folder that must be shared.

    Raises:
        ConfigError: the file did not appear.
    """
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{path} is not visible on {socket.gethostname()} after {seconds:g} s, although "
                f"{why}; set {key} to a folder that all nodes share"
            )
        # A failed lookup is cached too; listing the folders queries the server again.
        for folder in path.parents[:3]:
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                next(entries, None)
        time.sleep(0.5)
