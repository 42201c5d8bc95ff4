"""One training rank on the first GPU, and responses for it to learn from."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from qurl_megatron.actor.megatron import Ranks, megatron_runtime
from qurl_megatron.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from qurl_megatron.data.responses import Responses
from qurl_megatron.types import Prompt, Sample


@contextlib.contextmanager
def alone(meeting: Path) -> Iterator[Ranks]:
    """Yield Megatron's groups of a single rank, on a GPU with NCCL.

    Args:
        meeting: a file that is not there yet; no port, so that others cannot be met.
    """
    torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=0, world_size=1)
    with megatron_runtime(ParallelConfig()) as ranks:
        yield ranks
    dist.destroy_process_group()


def recipe(model: Path, tokens: int, *, recompute: bool = False) -> RunConfig:
    """Return a run of 16 responses in packed passes of ``tokens``, each about half of one."""
    return RunConfig(
        model=ModelConfig(path=str(model), dtype="bfloat16", recompute=recompute),
        data=DataConfig(task="chain_sum", prompts_per_step=4, max_prompt_tokens=tokens // 8),
        rollout=RolloutConfig(samples_per_prompt=4, max_new_tokens=tokens // 2 - tokens // 8),
        optimizer=OptimizerConfig(lr=1e-5),
        train=TrainConfig(max_tokens=tokens, packed=True),
    )


def made_up(config: RunConfig, vocab: int) -> Responses:
    """Return random responses to random prompts, each pair as long as the recipe allows."""
    draw = np.random.default_rng(0)
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    samples = []
    for index in range(config.data.prompts_per_step):
        ids = tuple(draw.integers(1, vocab - 1, prompt).tolist())
        for _ in range(config.rollout.samples_per_prompt):
            samples.append(
                Sample(
                    prompt=Prompt(index, ids, "", ""),
                    response_ids=draw.integers(1, vocab - 1, response).astype(np.int32),
                    behaviour_log_probs=np.full(response, -np.log(vocab), np.float32),
                    finish_reason="length",
                    versions=((0, response),),
                    reward=float(draw.integers(2)),
                )
            )
    return Responses.of(samples)
