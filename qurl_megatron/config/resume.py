"""Changes of settings when a run is resumed, judged by each key's rule."""

import filecmp
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qurl_megatron.config.keys import OnResume, rules_of
from qurl_megatron.config.load import SECTIONS, RunConfig

RULES: tuple[OnResume, ...] = ("free", "change", "fork", "never")


@dataclass(frozen=True)
class Change:
    """A key that has another value now than when the run was started last."""

    key: str  # section.key
    before: Any
    now: Any
    rule: OnResume

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.before)} -> {_shown(self.now)}"


def changes(before: RunConfig, now: RunConfig) -> list[Change]:
    """The settings in which ``now`` differs; ``train.run_dir``, where the run lies, is none."""
    before = replace(
        before,
        reward=replace(
            before.reward, function=_moved_name(before.reward.function, now.reward.function)
        ),
        rollout=replace(
            before.rollout,
            environment=_moved_name(before.rollout.environment, now.rollout.environment),
        ),
    )
    # An aligned policy computes as engines of one rollout.engine_tensor do.
    computed = {"rollout.engine_tensor"} if now.train.align == "full" else set()
    server_moved = before.reward.url and now.reward.url
    moved: dict[str, OnResume] = {"reward.url": "free"} if server_moved else {}
    differences = []
    for section, keys in rules().items():
        old, new = getattr(before, section), getattr(now, section)
        for name, marked in keys.items():
            key, a, b = f"{section}.{name}", getattr(old, name), getattr(new, name)
            if a != b and key != "train.run_dir":
                rule: OnResume = "fork" if key in computed else moved.get(key, marked)
                differences.append(Change(key, a, b, rule))
    return differences


def _moved_name(before: str, now: str) -> str:
    """``now`` where both are "path/to/file.py:name" and the file has moved, else ``before``."""
    (file, name), (other, other_name) = (
        (Path(path), name) for path, _, name in (spec.rpartition(":") for spec in (before, now))
    )
    if not file.suffix == other.suffix == ".py" or (file.name, name) != (other.name, other_name):
        return before
    # Where the old file is still there, another may have been meant.
    both_readable = os.access(file, os.R_OK) and os.access(other, os.R_OK)
    return before if both_readable and not filecmp.cmp(file, other, shallow=False) else now


def refused(found: list[Change], *, fork: bool = False) -> list[Change]:
    """Changes that make it another run; with ``fork``, those that rule out its checkpoint, too."""
    return [
        change for change in found if change.rule == "never" or (change.rule == "fork" and not fork)
    ]


def rules() -> dict[str, dict[str, OnResume]]:
    """The rule of every key: ``{section: {key: rule}}``."""
    return {name: rules_of(section) for name, section in SECTIONS.items()}


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        entries = (f"{name}: {entry}" for name, entry in value.items())
        return f"{{{', '.join(entries)}}}"
    return "''" if value == "" else str(value)
