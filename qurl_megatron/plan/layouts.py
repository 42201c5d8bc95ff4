"""Every way to lay a recipe out over N GPUs, as settings of the recipe.

Tensor ranks and the GPUs of an engine stay on one machine. Engines share all of the trainer's GPUs,
or have machines of their own; on a single machine, GPUs of their own.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from qurl_megatron.config import ParallelConfig, RunConfig, changes
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import Arch
from qurl_megatron.training.shapes import engine_divides


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One layout."""

    parallel: ParallelConfig
    recompute: bool
    engines: int
    engine_tensor: int
    colocated: bool

    @property
    def gpus(self) -> int:
        if self.colocated:
            return self.parallel.world_size
        return self.parallel.world_size + self.engines * self.engine_tensor

    def label(self) -> str:
        """Return a short name without sizes of 1; "+" has GPUs of its own, "&" shares them."""
        parallel = self.parallel
        sizes = {
            "TP": parallel.tensor,
            "PP": parallel.pipeline,
            "CP": parallel.context,
            "EP": parallel.expert,
            "DP": parallel.data,
        }
        parts = [f"{name}{size}" for name, size in sizes.items() if size > 1] or ["1 rank"]
        if self.recompute:
            parts.append("recompute")
        joint = "&" if self.colocated else "+"
        return f"{' '.join(parts)} {joint} {self.engines} x TP{self.engine_tensor}"


def choices(arch: Arch, own: ParallelConfig, gpus: int, node: int, shares: int) -> Iterator[Choice]:
    """Yield all layouts whose sizes divide the model, the batch, the GPUs and the machines.

    Args:
        own: the recipe's; its other settings are kept.
        node: GPUs of a machine.
        shares: must divide by the data ranks: an update's responses, or its microbatches.
    """
    within = _divisors(min(node, gpus))
    for trainer in range(1, gpus + 1) if gpus <= node else range(node, gpus + 1, node):
        colocated = trainer == gpus
        rollout = gpus if colocated else gpus - trainer
        engine_tensors = [n for n in within if rollout % n == 0 and engine_divides(arch, n)]
        trainers = [
            each for each in _trainers(arch, own, trainer, within) if not shares % each.data
        ]
        for engine, parallel, recompute in product(engine_tensors, trainers, (False, True)):
            yield Choice(
                parallel=parallel,
                recompute=recompute,
                engines=rollout // engine,
                engine_tensor=engine,
                colocated=colocated,
            )


def _trainers(
    arch: Arch, own: ParallelConfig, gpus: int, within: list[int]
) -> Iterator[ParallelConfig]:
    experts = _divisors(arch.experts.count) if arch.experts else [1]
    for tensor, pipeline, expert in product(within, _divisors(arch.num_layers), experts):
        dealt, uneven = divmod(gpus, pipeline * expert)
        if not dealt or uneven or (expert > 1 and expert % tensor):
            continue
        try:
            arch.check_parallel(tensor, pipeline, expert)
        except ConfigError:
            continue
        for context in within:
            data, unused = divmod(gpus, tensor * pipeline * context)
            if data and not unused:
                layout = replace(own, tensor=tensor, pipeline=pipeline, context=context, data=data)
                yield replace(layout, expert=expert)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def own_choice(config: RunConfig) -> Choice:
    rollout = config.rollout
    return Choice(
        parallel=config.parallel,
        recompute=config.model.recompute,
        engines=rollout.engines,
        engine_tensor=rollout.engine_tensor,
        colocated=rollout.colocate,
    )


def scaled(own: Choice, gpus: int) -> Choice | None:
    """Return the layout with data ranks and engines for ``gpus``; None if they are not whole."""
    data, unused = divmod(own.parallel.data * gpus, own.gpus)
    engines, over = divmod(own.engines * gpus, own.gpus)
    if unused or over or not (data and engines):
        return None
    return replace(own, parallel=replace(own.parallel, data=data), engines=engines)


def applied(config: RunConfig, choice: Choice, *, node: int, static: float | None) -> RunConfig:
    """Return the recipe in that layout, unchanged in its own; ``ConfigError`` if it forbids it.

    Versions go by memory on a single machine, by relay to engines on the trainer's GPUs, else point
    to point.

    Args:
        static: SGLang's --mem-fraction-static; None keeps the recipe's.
    """
    if choice == own_choice(config):
        return config
    rollout = config.rollout
    settings: dict[str, Any] = {
        "engines": choice.engines,
        "engine_tensor": choice.engine_tensor,
        "engine_first_gpu": 0,
        "colocate": choice.colocated,
        "rendezvous": "",
        "each_node": False,
    }
    sync = replace(config.sync, transport="auto")
    if choice.colocated:
        settings["max_staleness"] = 0
    if choice.gpus > node:
        settings |= {"rendezvous": rollout.rendezvous or "auto", "each_node": choice.colocated}
        sync = replace(sync, transport="auto" if choice.colocated else "group")
    elif not choice.colocated:
        settings["engine_first_gpu"] = choice.parallel.world_size
    if static is not None:
        kept = [a for a in rollout.engine_args if not a.startswith("--mem-fraction-static")]
        settings["engine_args"] = (*kept, f"--mem-fraction-static={static:g}")
    return replace(
        config,
        model=replace(config.model, recompute=choice.recompute),
        parallel=choice.parallel,
        rollout=replace(rollout, **settings),
        sync=sync,
    )


def overrides(before: RunConfig, after: RunConfig) -> list[str]:
    """Return the overrides that turn one into the other, as section.key=value."""
    now = {change.key: change.now for change in changes(before, after)}
    # JSON's numbers and lists are TOML's; strings without quotes are easier on a shell.
    return [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in now.items()]
