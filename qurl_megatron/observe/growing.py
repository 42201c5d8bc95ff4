"""A file that grows by pieces: each is there whole, or not at all where the disk is full."""

import os
from pathlib import Path


class Growing:
    """Appends to a file, which a crash leaves with at most the piece in flight torn."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, piece: bytes) -> None:
        """
        Raises:
            OSError: the system refused; the file is as it was before.
        """
        start = self._file.seek(0, os.SEEK_END)
        unwritten = memoryview(piece)
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError:
            self._file.truncate(start)
            raise

    def close(self) -> None:
        self._file.close()
