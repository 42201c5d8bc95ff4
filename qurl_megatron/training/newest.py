"""Whole checkpoints: recorded checksums compared by all ranks together.

Rank 0 looks at names and sizes, and all ranks at the bytes, each at some of the files; every rank
gets the same result. Looking for themselves, ranks might differ: network file systems cache
directories.

A damaged checkpoint of a run is set aside under another name once an older one has proved whole.
Where none has, nothing is touched: a run that began from scratch would write over files that can
perhaps be restored. A file that the system cannot read ends the run, but is not called damaged.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from qurl_megatron.actor.megatron import Ranks, on_lead, together
from qurl_megatron.checkpoints.integrity import FIX, FileSum, damaged, read_record, wrong_size
from qurl_megatron.checkpoints.places import find_torch_dist, folders
from qurl_megatron.kit.errors import ConfigError, Unreadable
from qurl_megatron.kit.filesystem import wait_until_seen
from qurl_megatron.training.state import STATE, TrainState, set_aside


def newest_whole(run_dir: Path, ranks: Ranks) -> tuple[Path, TrainState] | None:
    """Return a run's newest whole checkpoint and its state; None where there is none yet.

    Raises:
        ConfigError: there are checkpoints, and none is whole, or one cannot be read; nothing was
            changed.
    """
    broken: list[tuple[Path, str]] = []
    reading = "reading the run directory"
    for folder in reversed(on_lead(lambda: folders(run_dir), ranks, waiting_for=reading)):
        try:
            look = partial(_state_and_sums, folder)
            state, record = on_lead(look, ranks, waiting_for=str(folder))
        except Unreadable:
            raise
        except ConfigError as error:
            broken.append((folder, str(error)))
            continue
        wait_until_seen(folder / STATE, "rank 0 resumes from it", key="train.run_dir")
        if damage := find_damage(folder, record, ranks, key="train.run_dir"):
            broken.append((folder, damage))
            continue
        on_lead(partial(_set_aside, broken, folder), ranks, waiting_for=str(folder))
        return folder, state
    if broken:
        raise ConfigError(
            f"no checkpoint in {run_dir} is whole: {'; '.join(reason for _, reason in broken)}; "
            "restore these files, or start from scratch in another train.run_dir"
        )
    return None


def _state_and_sums(folder: Path) -> tuple[TrainState, dict[str, FileSum]]:
    """Return the state and the record of a checkpoint.

    Raises:
        Unreadable: the system cannot read it, or another version wrote it.
        ConfigError: it is damaged, by names and sizes, or by the state's bytes.
    """
    record = read_record(folder) or {}
    if reason := wrong_size(folder, record) or damaged(folder, record, {STATE} & record.keys()):
        raise ConfigError(reason)
    return TrainState.read(folder), record


def _set_aside(broken: list[tuple[Path, str]], newest: Path) -> None:
    for path, reason in broken:
        renamed_to = set_aside(path)
        print(
            f"{reason}: {path.name} is set aside as {renamed_to.name}, and the run goes on from "
            f"{newest.name}, the newest whole checkpoint",
            flush=True,
        )


def refuse_damaged_together(paths: Mapping[str, str], ranks: Ranks) -> None:
    """Compare all files of the checkpoints that a recipe names and that have checksums.

    Args:
        paths: checkpoints of any kind, by their keys in the recipe.

    Raises:
        ConfigError: one is damaged.
    """
    for key, path in paths.items():
        record = partial(_folder_and_sums, Path(path))
        folder, sums = on_lead(record, ranks, waiting_for=f"{key}={path}")
        if damage := find_damage(folder, sums, ranks, key=key):
            raise ConfigError(f"{damage}; {FIX}")


def _folder_and_sums(path: Path) -> tuple[Path, dict[str, FileSum]]:
    """Return the folder that a path leads to, and its record; raise ``ConfigError`` if wrong."""
    folder = find_torch_dist(path) or path
    record = read_record(folder) or {}
    if wrong := wrong_size(folder, record):
        raise ConfigError(f"{wrong}; {FIX}")
    return folder, record


def find_damage(
    folder: Path, record: Mapping[str, FileSum], ranks: Ranks, *, key: str
) -> str | None:
    """Return how a checkpoint's bytes are damaged, or None if they are as written.

    Args:
        key: recipe key of the folder.

    Raises:
        ConfigError: a rank does not see a file, or cannot read it.
    """
    largest_first = sorted(record, key=lambda name: -record[name].bytes)
    own_files = largest_first[ranks.rank :: ranks.world_size]

    def own_damage() -> str | None:
        for name in own_files:
            wait_until_seen(folder / name, "rank 0 sees it", key=key)
        return damaged(folder, record, own_files)

    return next(filter(None, together(own_damage)), None)
