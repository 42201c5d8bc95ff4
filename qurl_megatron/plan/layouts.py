"""Every way to lay a recipe out over N GPUs, as settings of the recipe.

Tensor ranks and the GPUs of an engine stay on one machine. Engines share the trainer's GPUs, all of
them, or have whole machines of their own (on a single machine: GPUs).
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

from qurl_megatron.config import RolloutConfig, RunConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import Arch
from qurl_megatron.training.shapes import engine_divides


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One layout."""

    tensor: int
    pipeline: int
    context: int
    data: int
    engines: int
    engine_tensor: int
    colocated: bool
    recompute: bool

    @property
    def trainer(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def gpus(self) -> int:
        return self.trainer + (0 if self.colocated else self.engines * self.engine_tensor)

    def label(self) -> str:
        """Short: sizes of 1 are left out; "+" has GPUs of its own, "&" shares them."""
        sizes = zip(
            ("TP", "PP", "CP", "DP"),
            (self.tensor, self.pipeline, self.context, self.data),
            strict=True,
        )
        parts = [f"{name}{size}" for name, size in sizes if size > 1] or ["1 rank"]
        parts += ["recompute"] if self.recompute else []
        joint = "&" if self.colocated else "+"
        return f"{' '.join(parts)} {joint} {self.engines} x TP{self.engine_tensor}"


def choices(arch: Arch, gpus: int, node: int, shares: int) -> Iterator[Choice]:
    """All whose sizes divide the model, the batch, the GPUs and the machines.

    Args:
        node: GPUs of a machine.
        shares: the number that data ranks divide: an update's responses, or its microbatches.
    """
    within = _divisors(min(node, gpus))
    for trainer in [gpus, *_splits(gpus, node)]:
        colocated = trainer == gpus
        for engine in within:
            rollout = gpus if colocated else gpus - trainer
            if rollout % engine or not engine_divides(arch, engine):
                continue
            for tensor, pipeline, context, data in _trainers(arch, trainer, within):
                if shares % data:
                    continue
                for recompute in (False, True):
                    yield Choice(
                        tensor=tensor,
                        pipeline=pipeline,
                        context=context,
                        data=data,
                        engines=rollout // engine,
                        engine_tensor=engine,
                        colocated=colocated,
                        recompute=recompute,
                    )


def _splits(gpus: int, node: int) -> range:
    """How many GPUs the trainer may have where the engines have the rest."""
    return range(node, gpus, node) if gpus > node else range(1, gpus)


def _trainers(arch: Arch, gpus: int, within: list[int]) -> Iterator[tuple[int, int, int, int]]:
    for tensor in within:
        for pipeline in _divisors(arch.num_layers):
            if not _divides(arch, tensor, pipeline):
                continue
            for context in within:
                data, unused = divmod(gpus, tensor * pipeline * context)
                if data and not unused:
                    yield tensor, pipeline, context, data


def _divides(arch: Arch, tensor: int, pipeline: int) -> bool:
    try:
        arch.check_parallel(tensor, pipeline)
    except ConfigError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def own_choice(config: RunConfig) -> Choice:
    """The layout that the recipe says."""
    parallel, rollout = config.parallel, config.rollout
    return Choice(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        context=parallel.context,
        data=parallel.data,
        engines=rollout.engines,
        engine_tensor=rollout.engine_tensor,
        colocated=rollout.colocate,
        recompute=config.model.recompute,
    )


def scaled(own: Choice, gpus: int) -> Choice | None:
    """The same with data ranks and engines for ``gpus``; None where they do not come out whole."""
    data, unused = divmod(own.data * gpus, own.gpus)
    engines, over = divmod(own.engines * gpus, own.gpus)
    if unused or over or not (data and engines):
        return None
    return replace(own, data=data, engines=engines)


def applied(config: RunConfig, choice: Choice, *, node: int, static: float | None) -> RunConfig:
    """The recipe in that layout.

    Versions go by the memory of one machine where there is but one; else point to point, which
    engines that share the trainer's GPUs cannot (NCCL wants two GPUs): theirs go by files.

    Args:
        static: SGLang's --mem-fraction-static; None keeps the recipe's.

    Raises:
        ConfigError: the batch does not divide, or the recipe forbids it otherwise.
    """
    rollout = config.rollout
    one_machine = choice.gpus <= node
    arguments = rollout.engine_args
    if static is not None:
        kept = [a for a in arguments if not a.startswith("--mem-fraction-static")]
        arguments = (*kept, f"--mem-fraction-static={static:g}")
    across: Literal["files", "group"] = "files" if choice.colocated else "group"
    return replace(
        config,
        model=replace(config.model, recompute=choice.recompute),
        parallel=replace(
            config.parallel,
            tensor=choice.tensor,
            pipeline=choice.pipeline,
            context=choice.context,
            data=choice.data,
        ),
        rollout=replace(
            rollout,
            engines=choice.engines,
            engine_tensor=choice.engine_tensor,
            engine_args=arguments,
            colocate=choice.colocated,
            max_staleness=0 if choice.colocated else rollout.max_staleness,
            rendezvous="" if one_machine else rollout.rendezvous or "ENGINES",
        ),
        sync=replace(config.sync, transport="auto" if one_machine else across),
    )


def overrides(before: RunConfig, after: RunConfig) -> list[str]:
    """Return the overrides that turn one into the other, as section.key=value."""
    changed = []
    for section in fields(after):
        old, new = getattr(before, section.name), getattr(after, section.name)
        for key in fields(new):
            value = getattr(new, key.name)
            if value != getattr(old, key.name):
                changed.append(f"{section.name}.{key.name}={_toml(value)}")
    return changed


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ",".join(f'"{item}"' for item in value) + "]"
    return str(value)


def check_backend(rollout: RolloutConfig) -> None:
    """Refuse engines whose speed nobody predicts.

    Raises:
        ConfigError: they are not SGLang's.
    """
    if rollout.backend != "sglang":
        raise ConfigError(
            "qurl plan predicts SGLang engines on GPUs, and "
            f"rollout.backend={rollout.backend}: set rollout.backend=sglang"
        )
