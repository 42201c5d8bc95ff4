"""The user's own code that a run or an evaluation calls (rewards, environment, loss), by checksum.

Unlike data it may change under a run: who is told to fix a reward goes on from the checkpoint. But
its new scores are not compared with earlier ones. Files alone are watched: neither their imports,
nor a server behind a URL.
"""

import importlib.util
import os
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from qurl_megatron.config.sections import RewardConfig, RolloutConfig
from qurl_megatron.data.rows import checksum_of


def named_code(reward: RewardConfig, rollout: RolloutConfig, loss: str = "") -> dict[str, str]:
    """Return the names of code, "file.py:name" or "package.module:name", by key.

    Args:
        loss: ``algo.function``; evaluations have none.
    """
    functions = {f"{key}.function": part.function for key, part in reward.parts.items()}
    names_by_key = {**functions, "rollout.environment": rollout.environment, "algo.function": loss}
    return {key: name for key, name in names_by_key.items() if name}


def checksums(named: Mapping[str, str]) -> dict[str, str]:
    """Return the checksums of ``named_code`` by key, leaving out code in no readable file."""
    files = {key: _file_of(name) for key, name in named.items()}
    return {
        key: checksum_of(path)
        for key, path in files.items()
        if path and path.is_file() and os.access(path, os.R_OK)
    }


def edited(named: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """Return the changed part of ``named_code``, as "reward.function=..." by its key.

    Args:
        before: its former checksums; a name without one counts as unchanged.
    """
    return {
        key: f"{key}={named[key]}"
        for key, checksum in checksums(named).items()
        if before.get(key, checksum) != checksum
    }


def _file_of(name: str) -> Path | None:
    """The file of "file.py:name" or "package.module:name", found without running it: importing a
    module, or its package, is for workers alone."""
    target = name.rpartition(":")[0]
    if target.endswith(".py"):
        return Path(target)
    top, *inner = target.split(".")
    # A worker looks in the working folder first.
    spec = PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # Not by its whole name, for which a folder without __init__.py looks up its parents.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return Path(spec.origin) if spec and spec.origin else None
