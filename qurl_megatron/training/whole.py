"""Checkpoints against their recorded checksums; each rank compares some of the files.

Every rank gets the same finding. A file that the system cannot read ends the run, but is
not called damaged, and nothing is changed.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch.distributed as dist

from qurl_megatron.actor.megatron import Ranks, on_lead
from qurl_megatron.checkpoints.integrity import FIX, FileSum, damaged, read_record, wrong_size
from qurl_megatron.checkpoints.places import find_torch_dist
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.filesystem import wait_until_seen


def refuse_damaged_together(paths: Mapping[str, str], ranks: Ranks) -> None:
    """Read all files of those checkpoints that have a record of them.

    Args:
        paths: checkpoints of any kind, by their keys in the recipe.

    Raises:
        ConfigError: one is damaged.
    """
    for key, path in paths.items():
        record = partial(_recorded, Path(path))
        folder, sums = on_lead(record, ranks, waiting_for=f"{key}={path}")
        if why := damage(folder, sums, ranks, key=key):
            raise ConfigError(f"{why}; {FIX}")


def damage(folder: Path, record: Mapping[str, FileSum], ranks: Ranks, *, key: str) -> str | None:
    """Return the reason why a checkpoint's bytes are damaged, or None if they are as written.

    Args:
        key: recipe key of the folder.

    Raises:
        ConfigError: a rank does not see a file, or cannot read it.
    """
    largest_first = sorted(record, key=lambda name: -record[name].bytes)
    mine = largest_first[ranks.rank :: ranks.world_size]
    found: str | ConfigError | None
    try:
        for name in mine:
            wait_until_seen(folder / name, "rank 0 sees it", key=key)
        found = damaged(folder, record, mine)
    except ConfigError as error:  # the others wait for this rank's finding
        found = error
    everywhere: list[str | ConfigError | None] = [None] * ranks.world_size
    dist.all_gather_object(everywhere, found)
    for one in everywhere:
        if isinstance(one, ConfigError):
            raise one
    return next((one for one in everywhere if isinstance(one, str)), None)


def _recorded(path: Path) -> tuple[Path, dict[str, FileSum]]:
    """Return the folder that a path leads to, and its record.

    Raises:
        ConfigError: it cannot be used.
    """
    folder = find_torch_dist(path) or path
    record = read_record(folder) or {}
    if wrong := wrong_size(folder, record):
        raise ConfigError(f"{wrong}; {FIX}")
    return folder, record
