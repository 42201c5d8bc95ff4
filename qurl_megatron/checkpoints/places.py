"""Find a checkpoint and the folder that describes its model, by names alone, without torch."""

import re
from pathlib import Path
from typing import Any

from qurl_megatron.kit.disk import read_json
from qurl_megatron.kit.errors import ConfigError

DESCRIPTION = "hf"
"""The folder inside a Megatron checkpoint that holds config.json and the tokenizer."""

METADATA = ".metadata"
"""The file of a ``torch_dist`` checkpoint that lists its tensors."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
"""A Hugging Face folder has one of the two: an index of its weight files, or a single file."""


def description_of(folder: str | Path) -> Path:
    """Return the folder with config.json and tokenizer: a Hugging Face folder itself, else inside.

    Raises:
        ConfigError: a Megatron checkpoint carries none.
    """
    megatron = find_torch_dist(Path(folder))
    if megatron is None:
        return Path(folder)
    described = megatron / DESCRIPTION
    if not (described / "config.json").is_file():
        raise ConfigError(
            f"{megatron} does not say what model it is ({DESCRIPTION}/config.json is missing); "
            "name the Hugging Face folder it was made from (--hf), or copy that folder's "
            f"config.json and tokenizer files to {described}"
        )
    return described


def find_torch_dist(folder: Path) -> Path | None:
    """Return ``folder`` if it is a ``torch_dist`` folder, else the newest in it; None without one.

    It reads Megatron-LM's ``latest_checkpointed_iteration.txt`` and this package's run folders.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; name a checkpoint")
    if is_torch_dist(folder):
        return folder
    tracker = folder / "latest_checkpointed_iteration.txt"
    if tracker.is_file():
        newest = tracker.read_bytes()[:80].decode(errors="replace").strip()
        if newest != "release" and not newest.isdecimal():
            raise ConfigError(f"{tracker} must hold a number, or release, got {newest!r}")
        inner = folder / (newest if newest == "release" else f"iter_{newest:0>7}")
        if not is_torch_dist(inner):
            raise ConfigError(f"{tracker} names {inner}, which is not a torch_dist checkpoint")
        return inner
    return next(filter(is_torch_dist, reversed(folders(folder))), None)


def folders(run_dir: Path) -> list[Path]:
    """Return all checkpoints of a run, oldest first, damaged ones too."""
    folders_of_steps = (run_dir / "checkpoints").glob("step_*")
    steps = [path for path in folders_of_steps if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(steps, key=lambda path: int(path.name.removeprefix("step_")))


def is_torch_dist(folder: Path) -> bool:
    return (folder / METADATA).is_file() and (folder / "metadata.json").is_file()


def safetensors_files(folder: Path) -> list[Path]:
    """Return the weight files of a Hugging Face folder.

    Raises:
        ConfigError: there are none, or the index names one that is missing.
    """
    index = folder / INDEX
    if index.is_file():
        places = read_json(index).get("weight_map")
        names: list[Any] = list(places.values()) if isinstance(places, dict) else [None]
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ConfigError(f"{index} has no weight_map from tensors to files beside it")
        names = sorted(set(names))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ConfigError(f"{index} names {missing[0]}, which is not in {folder}")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickles = sorted(p.name for ending in ("bin", "pt", "pth") for p in folder.glob(f"*.{ending}"))
    remark = f"; pickle files ({pickles[0]}) are never loaded" if pickles else ""
    raise ConfigError(
        f"{folder} has no {SINGLE} and no {INDEX}{remark}; save the model as safetensors"
    )
