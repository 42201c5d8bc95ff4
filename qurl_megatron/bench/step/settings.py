"""What is to be run: a recipe in its own layout by staleness, and in others for scaling."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qurl_megatron.bench import environment
from qurl_megatron.bench.load.limits import gpu_named
from qurl_megatron.bench.step.sizes import Sizes, growth, smallest
from qurl_megatron.config import load
from qurl_megatron.errors import ConfigError
from qurl_megatron.planning import machine
from qurl_megatron.planning.constants import Gpu, unknown
from qurl_megatron.planning.own import Own


@dataclass(frozen=True, kw_only=True)
class StepSetting:
    """One thing to run."""

    name: str
    keys: dict[str, str | int]
    own: Own
    sizes: Sizes | None = None  # None: the recipe's own layout
    work: float = 1.0  # times that of the smallest layout


def machine_of(options: argparse.Namespace) -> Gpu:
    """What the ranks run on: the data sheet of its GPUs, or this CPU where it has none."""
    config = load(options.recipe, options.overrides)
    gpus = environment.gpus()
    if not gpus:
        return machine.here(config.model.dtype, options.threads)
    return gpu_named(gpus[0]["name"], config.quant.scheme) or unknown(gpus[0]["name"])


def setting_of(
    options: argparse.Namespace, here: Gpu, name: str, keys: dict, overrides: Sequence[str], **more
) -> StepSetting:
    """
    Raises:
        ConfigError: the recipe cannot be run so.
    """
    recipe = Path(options.recipe)
    threads = [f"rollout.engine_threads={options.threads}"] if options.threads else []
    own = Own(
        recipe,
        (*options.overrides, *threads, *overrides),
        here,
        node=max(1, len(environment.gpus())),
        prompt=options.mean_prompt_tokens,
        mean=options.mean_tokens,
    )
    own.config  # noqa: B018  a mistake is reported now, not after minutes of measuring
    given = {
        "recipe": recipe.stem,
        "steps": options.steps,
        "overrides": " ".join(options.overrides),
        "threads": options.threads,
    }
    return StepSetting(name=f"{recipe.stem}, {name}", keys={**given, **keys}, own=own, **more)


def in_own_layout(options: argparse.Namespace, here: Gpu) -> list[StepSetting]:
    return [
        setting_of(
            options,
            here,
            f"staleness {staleness}",
            {"staleness": staleness},
            [f"rollout.max_staleness={staleness}"],
        )
        for staleness in dict.fromkeys(options.staleness)
    ]


def scaled(options: argparse.Namespace, here: Gpu, layouts: Sequence[Sizes]) -> list[StepSetting]:
    """Strong scaling of each layout, weak scaling of those that can have it.

    Raises:
        ConfigError: prompts do not come out whole.
    """
    if not layouts:
        return []
    base = smallest(layouts)
    found = [scaling_setting(options, here, sizes, 1.0, "strong") for sizes in layouts]
    for sizes in layouts:
        if (work := growth(sizes, base)) > 1:
            found.append(scaling_setting(options, here, sizes, work, "weak"))
    return found


def scaling_setting(
    options: argparse.Namespace, here: Gpu, sizes: Sizes, work: float, kind: str
) -> StepSetting:
    prompts = load(options.recipe, options.overrides).data.prompts_per_step * work
    if prompts != int(prompts):
        raise ConfigError(
            f"--layouts {sizes.name}: weak scaling needs {prompts:g} prompts a step; give another "
            "data.prompts_per_step"
        )
    return setting_of(
        options,
        here,
        f"{sizes.name}, {kind}",
        {"staleness": 0, "layout": sizes.name, "scaling": kind},
        [*sizes.overrides(int(prompts)), "rollout.max_staleness=0"],
        sizes=sizes,
        work=work,
    )
