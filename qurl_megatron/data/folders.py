"""Folders that are there whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qurl_megatron.kit.errors import ConfigError


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a scratch folder beside ``path`` that becomes ``path`` when the block ends well.

    Whoever looks at ``path`` sees nothing or everything; a block that raises leaves nothing behind.

    Raises:
        ConfigError: ``path`` exists and is not an empty folder.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{path} exists already; remove it or name another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield aside
        aside.chmod(0o777 & ~_umask())  # mkdtemp makes it private
        os.rename(aside, path)  # an empty folder at ``path`` is replaced
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
