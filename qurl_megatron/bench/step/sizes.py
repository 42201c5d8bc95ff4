"""How far a step can scale: layouts by name, and what linear scaling makes of the smallest one.

**Strong**: the same work for more ranks. **Weak**: as much work for each; prompts grow with data
ranks or engines, so layouts with neither have no such case. Linear is what each side would take if
its ranks lost nothing: score and train by training ranks, rollout by engines. Reward is not split,
and grows with the prompts; publish, and what no phase counts, stay as they are. On a CPU it is not
the ranks that count but what the cores under them multiply, as it was measured: beyond the cores
linear is level.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from qurl_megatron.errors import ConfigError
from qurl_megatron.planning.constants import Gpu

KEYS = {
    "tp": ("tensor", "parallel.tensor"),
    "pp": ("pipeline", "parallel.pipeline"),
    "dp": ("data", "parallel.data"),
    "engines": ("engines", "rollout.engines"),
}
"""By what a layout's name says: the field of ``Sizes``, and the recipe's key."""

SPLIT = {"rollout": "engines", "score": "trainer", "train": "trainer"}
"""By phase, whose number it goes by."""
UNSPLIT = "reward"
"""A phase that one process does for all responses."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    engines: int = 1

    @property
    def trainer(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def name(self) -> str:
        """As it is read: "tp2+engines2"; sizes of 1 are left out."""
        given = [f"{n}{size}" for n, (key, _) in KEYS.items() if (size := getattr(self, key)) > 1]
        return "+".join(given) or "tp1"

    def overrides(self, prompts: int) -> list[str]:
        """What turns a recipe into this layout, with so many prompts a step."""
        found = [f"{key}={getattr(self, name)}" for name, key in KEYS.values()]
        return [*found, f"data.prompts_per_step={prompts}"]


def parse(name: str) -> Sizes:
    """
    Raises:
        ConfigError: it is not the name of a layout.
    """
    sizes: dict[str, int] = {}
    for part in name.split("+"):
        found = re.fullmatch(rf"({'|'.join(KEYS)})([1-9]\d*)", part)
        if not found or KEYS[found[1]][0] in sizes:
            raise ConfigError(
                f"--layouts {name} is not a layout; join {', '.join(KEYS)} with a number each, "
                "e.g. tp2+engines2"
            )
        sizes[KEYS[found[1]][0]] = int(found[2])
    return Sizes(**sizes)


def smallest(layouts: Sequence[Sizes]) -> Sizes:
    return min(layouts, key=lambda sizes: sizes.trainer + sizes.engines)


def growth(sizes: Sizes, base: Sizes) -> float:
    """Of the prompts, where each rank keeps its work; 1 where nothing takes whole prompts."""
    return max(sizes.data / base.data, sizes.engines / base.engines)


def doubled(layouts: Sequence[Sizes]) -> list[Sizes]:
    """Each layout with its sizes above 1 twice as large, unless it is among them already."""
    found = [
        replace(one, **{f.name: 2 * n for f in fields(one) if (n := getattr(one, f.name)) > 1})
        for one in layouts
    ]
    return [one for one in dict.fromkeys(found) if one not in layouts]


def gain(now: int, before: int, machine: Gpu) -> float:
    """How much faster ``now`` ranks can be than ``before``; on a CPU, how much faster the cores
    that they keep busy multiply."""
    if machine.cores is None:
        return now / before
    rates = [machine.together(ranks).flops["none"] for ranks in (now, before)]
    return rates[0] / rates[1]


def linear(
    phases: dict[str, float], sizes: Sizes, base: Sizes, work: float, machine: Gpu
) -> dict[str, float]:
    """Seconds of each phase and of the step at linear scaling.

    Args:
        phases: seconds of the smallest layout, by phase and "step".
        work: times that of the smallest layout.
    """
    found = {}
    for phase, seconds in phases.items():
        side = SPLIT.get(phase)
        if side:
            found[phase] = seconds * work / gain(getattr(sizes, side), getattr(base, side), machine)
        elif phase == UNSPLIT:
            found[phase] = seconds * work
    rest = phases["step"] - sum(phases[phase] for phase in found)
    return {**found, "step": sum(found.values()) + rest}


def sharing(sizes: Sizes, machine: Gpu) -> str:
    """Who has which cores, for a case's notes; "" on GPUs."""
    if machine.cores is None:
        return ""
    told = []
    for count, who in ((sizes.trainer, "training rank"), (sizes.engines, "engine")):
        threads = machine.threads or max(1, machine.cores // count)
        plural = "s" if count > 1 else ""
        each = f" of {threads} threads" if threads > 1 else ""
        told.append(f"{count} {who}{plural}{each}, {count * threads / machine.cores:g} a core")
    return f"{'; '.join(told)} ({machine.cores} cores)"
