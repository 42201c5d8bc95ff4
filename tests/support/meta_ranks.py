"""Stages of a run built on the meta device, in one process, and the memory that they hold.

Torch's fake process group answers every collective at once, so Megatron's groups can be made for
thousands of ranks in a process of their own; on the meta device a model of any size takes no
memory. Only the numbers are missing from a model that is built so.
"""

import functools
import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.config import (
    AlgoConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from qurl_megatron.plan.memory import Held
from qurl_megatron.tensors.arch import Arch
from qurl_megatron.training.shapes import Models

META = torch.device("meta")


def built(config: RunConfig, models: Models) -> list[tuple[Held, Held | None]]:
    """Return the memory of policy and critic on tensor rank 0 of each pipeline stage."""
    return _process().submit(_built, config, models).result()


@functools.cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _built(config: RunConfig, models: Models) -> list[tuple[Held, Held | None]]:
    return [_stage_built(config, models, index) for index in range(config.parallel.pipeline)]


def _stage_built(config: RunConfig, models: Models, index: int) -> tuple[Held, Held | None]:
    parallel = config.parallel
    # Megatron numbers tensor ranks innermost and pipeline stages outermost.
    rank = index * (parallel.world_size // parallel.pipeline)
    with _on_meta(parallel, rank) as ranks:
        assert (ranks.pipeline.rank, ranks.tensor.rank, ranks.data.rank) == (index, 0, 0)
        policy = _built_model(config, models.policy, ranks)
        critic = _built_model(config, models.critic, ranks, critic=True) if models.critic else None
    return policy, critic


@contextmanager
def _on_meta(config: ParallelConfig, rank: int) -> Iterator[Any]:
    """Megatron's state as rank ``rank`` of ``config.world_size`` ranks has it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    from qurl_megatron.actor import cpu
    from qurl_megatron.actor.megatron import megatron_runtime

    cpu.install()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.world_size)
    try:
        with megatron_runtime(config) as ranks, cpu.current_device(META):
            yield replace(ranks, device=META)
    finally:
        dist.destroy_process_group()


def _built_model(config: RunConfig, arch: Arch, ranks: Any, *, critic: bool = False) -> Held:
    """Build one model with its optimizer; a critic is a body with a head of its own."""
    from qurl_megatron.actor.build import build_model, transformer_config
    from qurl_megatron.actor.critic import ValueHead
    from qurl_megatron.actor.trained import with_optimizer

    megatron = transformer_config(arch, config.model, config.parallel)
    with META:
        gpt = build_model(arch, megatron, ranks)
        if critic and ranks.last_stage:
            gpt.output_layer = ValueHead(megatron, ranks)
    model, optimizer, _ = with_optimizer(gpt, megatron, config.optimizer)
    return held(model, optimizer)


def held(model: Any, optimizer: Any) -> Held:
    """Count the storages of a wrapped model and its optimizer, with their buffers' padding."""
    parameters = list(model.module.parameters())
    weights = _storages(p.data for p in parameters)
    buffers = [*model.buffers, *model.expert_parallel_buffers]
    adams = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    updated = [p for adam in adams for group in adam.param_groups for p in group["params"]]
    moments = [
        adam.state[p][moment]
        for adam in adams
        for group in adam.param_groups
        for p in group["params"]
        for moment in ("exp_avg", "exp_avg_sq")
    ]
    # Models in FP32 are updated in place: their masters are the weights.
    masters = {key: size for key, size in _storages(updated).items() if key not in weights}
    return Held(
        parameters=sum(p.numel() for p in parameters),
        largest=max(p.numel() for p in parameters),
        weights=sum(weights.values()),
        gradients=sum(_storages(buffer.grad_data for buffer in buffers).values()),
        masters=sum(masters.values()),
        moments=sum(_storages(moments).values()),
    )


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes by storage: views of one buffer count once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in storages}


def small_recipe(
    folder: Path, *, dtype="bfloat16", optimizer=None, algo=None, **parallel
) -> RunConfig:
    """Return a run of 16 responses in passes of two."""
    return RunConfig(
        model=ModelConfig(path=str(folder), dtype=dtype),
        data=DataConfig(task="chain_sum", prompts_per_step=8),
        rollout=RolloutConfig(samples_per_prompt=2),
        parallel=ParallelConfig(**parallel),
        optimizer=optimizer or OptimizerConfig(),
        algo=algo or AlgoConfig(),
        train=TrainConfig(micro_batch=2),
    )
