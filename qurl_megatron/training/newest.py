"""The newest undamaged checkpoint of a run, found by all ranks together.

Rank 0 looks at names and sizes, and all ranks at the bytes (``whole``). A damaged checkpoint is set
aside under another name once an older one has proved whole. Where none has, nothing is touched: a
run that began from scratch would write over files that can perhaps be restored.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from qurl_megatron.actor.megatron import Ranks, on_lead
from qurl_megatron.checkpoints.integrity import RECORD, FileSum, damaged, read_record, wrong_size
from qurl_megatron.kit.errors import ConfigError, Unreadable
from qurl_megatron.kit.filesystem import wait_until_seen
from qurl_megatron.training.state import STATE, TrainState, folders, set_aside
from qurl_megatron.training.whole import damage


def newest_whole(run_dir: Path, ranks: Ranks) -> tuple[Path, TrainState] | None:
    """The newest whole checkpoint and its state, on every rank alike; None where there is none yet.

    All ranks call it together. Their own look at the folder might differ: directories of network
    file systems are cached.

    Raises:
        ConfigError: there are checkpoints, and none is whole, or one cannot be read; nothing was
            changed.
    """
    broken: list[tuple[Path, str]] = []
    reading = "reading the run directory"
    for folder in reversed(on_lead(lambda: folders(run_dir), ranks, waiting_for=reading)):
        try:
            look = partial(_at_first_sight, folder)
            state, record = on_lead(look, ranks, waiting_for=str(folder))
        except Unreadable:
            raise
        except ConfigError as error:
            broken.append((folder, str(error)))
            continue
        if reason := _closely(folder, record or {}, ranks):
            broken.append((folder, reason))
            continue
        on_lead(partial(_tell, folder, record, broken), ranks, waiting_for=str(folder))
        return folder, state
    if broken:
        raise ConfigError(
            f"no checkpoint in {run_dir} is whole: {'; '.join(reason for _, reason in broken)}; "
            "restore these files, or start from scratch in another train.run_dir"
        )
    return None


def _at_first_sight(folder: Path) -> tuple[TrainState, dict[str, FileSum] | None]:
    """Return the state and the record of a checkpoint.

    Raises:
        Unreadable: the system cannot read it, or another version wrote it.
        ConfigError: it is damaged, by names and sizes, or by the state's bytes.
    """
    record = read_record(folder)
    sums = record or {}
    if reason := wrong_size(folder, sums) or damaged(folder, sums, {STATE} & sums.keys()):
        raise ConfigError(reason)
    return TrainState.read(folder), record


def _closely(folder: Path, record: Mapping[str, FileSum], ranks: Ranks) -> str | None:
    """Return the reason why a checkpoint's bytes are damaged, or None if they are as written."""
    wait_until_seen(folder / STATE, "rank 0 resumes from it", key="train.run_dir")
    return damage(folder, record, ranks, key="train.run_dir")


def _tell(folder: Path, record: object, broken: list[tuple[Path, str]]) -> None:
    for path, reason in broken:
        kept = set_aside(path)
        print(
            f"{reason}: {path.name} is set aside as {kept.name}, and the run goes on from "
            f"{folder.name}, the newest whole checkpoint",
            flush=True,
        )
    if record is None:
        print(
            f"{folder} has no {RECORD}, as it was written without checksums: its files are taken "
            "as they are",
            flush=True,
        )
