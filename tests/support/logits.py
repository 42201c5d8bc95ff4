"""Logits of a Megatron model in any layout, held against Hugging Face's."""

from pathlib import Path

import torch
import torch.distributed as dist

from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.checkpoints.huggingface import HfReader
from qurl_megatron.config import ModelConfig, ParallelConfig
from qurl_megatron.tensors.arch import read_arch, read_config
from tests.support.ranks import run_on_ranks

LAYOUTS = [{}, dict(tensor=2), dict(pipeline=2), dict(tensor=2, pipeline=2)]
IDS = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(0))


def assert_logits(
    folder: Path,
    layout: dict,
    backend: str,
    tmp_path: Path,
    *,
    uaq_scale: float = 1.0,
    converted: Path | None = None,
    ids: torch.Tensor = IDS,
    run=run_on_ranks,
    **options,
) -> None:
    """A model of this layout, loaded from a Hugging Face folder, has the logits that it has there.

    Args:
        converted: load it from this folder of Megatron's instead, as any user of megatron-core
            does, knowing nothing of this package.
        run: starts the ranks, with ``options``.
    """
    parallel, expected = ParallelConfig(**layout), hf_logits(folder, ids)
    model = (folder, parallel, uaq_scale, converted)
    run(check_logits, parallel.world_size, backend, tmp_path, *model, ids, expected, **options)


def hf_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits


def forward(model, arch, ranks, ids) -> torch.Tensor | None:
    """Whole logits [B, S, V] on the last pipeline stage, None on the others."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)

    def step(_, model):
        return model(ids, positions, None), lambda logits, non_loss_data: logits

    with torch.no_grad():
        (logits,) = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=None,
            model=model,
            num_microbatches=1,
            seq_length=ids.shape[1],
            micro_batch_size=ids.shape[0],
            forward_only=True,
            collect_non_loss_data=True,
        ) or (None,)
    if logits is None:
        return None
    shards = [torch.empty_like(logits) for _ in range(ranks.tensor.size)]
    dist.all_gather(shards, logits.contiguous(), group=ranks.tensor.group)
    return torch.cat(shards, -1)[..., : arch.vocab].cpu()


def check_logits(device, folder, parallel, uaq_scale, converted, ids, expected) -> None:
    from qurl_megatron.actor.build import build_model, load_weights, transformer_config

    with megatron_runtime(parallel) as ranks:
        arch = read_arch(read_config(folder))
        config = transformer_config(arch, ModelConfig(path=str(folder), dtype="float32"), parallel)
        model = build_model(arch, config, ranks)
        if converted is None:
            load_weights(model, arch, ranks, HfReader(folder), uaq_scale)
        else:
            load_as_anybody(model, converted)
        logits = forward(model, arch, ranks, ids.to(device))
        if logits is not None:
            assert (logits - expected).abs().max() < 1e-4


def load_as_anybody(model, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    state = model.sharded_state_dict(metadata={"singleton_local_shards": False})
    model.load_state_dict(dist_checkpointing.load({"model": state}, str(folder))["model"])
