"""What may change where a run goes on from its checkpoint; the sections' metadata say it by key."""

import filecmp
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from qurl_megatron.config.load import RunConfig
from qurl_megatron.config.sections import (
    MixedReward,
    OnResume,
    RewardConfig,
    RewardSource,
    rules_of,
)

Source = TypeVar("Source", bound=RewardSource)

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
        reward=_moved(before.reward, now.reward),
        rollout=replace(
            before.rollout,
            environment=_moved_name(before.rollout.environment, now.rollout.environment),
        ),
    )
    # An aligned policy computes as engines of one rollout.engine_tensor do.
    computed = {"rollout.engine_tensor"} if now.train.align == "full" else set()
    weighed = before.reward.scorers == now.reward.scorers  # the same rewards
    moved: dict[str, OnResume]
    moved = {"reward.mix": "change", "reward.url": "free"} if weighed else {}
    found = []
    for section in fields(RunConfig):
        old, new = getattr(before, section.name), getattr(now, section.name)
        for name, marked in rules_of(section.type).items():
            key, a, b = f"{section.name}.{name}", getattr(old, name), getattr(new, name)
            if a != b and key != "train.run_dir":
                rule: OnResume = "fork" if key in computed else moved.get(key, marked)
                found.append(Change(key, a, b, rule))
    return found


def _moved(before: RewardConfig, now: RewardConfig) -> RewardConfig:
    """``before``, with its functions where ``now`` has their files: a recipe's folder may move."""

    def moved(one: Source, other: RewardSource) -> Source:
        return replace(one, function=_moved_name(one.function, other.function))

    mix = {
        name: moved(part, now.mix[name]) if name in now.mix else part
        for name, part in before.mix.items()
    }
    return replace(moved(before, now), mix=mix)


def _moved_name(before: str, now: str) -> str:
    """``now`` where both are "path/to/file.py:name" and the file has moved, else ``before``."""
    (file, name), (other, wanted) = (
        (Path(path), name) for path, _, name in (one.rpartition(":") for one in (before, now))
    )
    if not file.suffix == other.suffix == ".py" or (file.name, name) != (other.name, wanted):
        return before
    # Where the old file is still there, another may have been meant.
    there = os.access(file, os.R_OK) and os.access(other, os.R_OK)
    return before if there and not filecmp.cmp(file, other, shallow=False) else now


def refused(found: list[Change], *, fork: bool = False) -> list[Change]:
    """Those that make it another run; or, with ``fork``, one that cannot begin with the checkpoint
    of this one."""
    return [one for one in found if one.rule == "never" or (one.rule == "fork" and not fork)]


def rules() -> dict[str, dict[str, OnResume]]:
    """The rule of every key: ``{section: {key: rule}}``."""
    return {section.name: rules_of(section.type) for section in fields(RunConfig)}


def page_table() -> str:
    """The rules by section, as the table of docs/recipes.md."""
    rows = [
        "| section | may change, and computes the same | may change | only in a fork | never |",
        "|---|---|---|---|---|",
    ]
    for section, keys in rules().items():
        cells = [_named(rule, list(keys.values()), keys) for rule in RULES]
        rows.append(f"| `{section}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def _named(rule: OnResume, all_rules: list[OnResume], keys: dict[str, OnResume]) -> str:
    """The keys of a rule; of the rule that most keys of the section have, no names."""
    if rule == max(RULES, key=all_rules.count):
        return "all" if len(set(all_rules)) == 1 else "all others"
    return " ".join(f"`{key}`" for key, its in keys.items() if its == rule)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        parts = (
            f"{name}: {one.weight:g} * {one.described}"
            if isinstance(one, MixedReward)
            else f"{name}: {one}"
            for name, one in value.items()
        )
        return f"{{{', '.join(parts)}}}"
    return "''" if value == "" else str(value)
