"""``qurl show --dry-run``: a run built on the meta device, and the memory of each rank.

Every pipeline stage is built as its own tensor rank 0 would build it: Megatron's model, gradient
buffers and optimizer, in one process and without weights. The tensor ranks of a stage are alike,
and so are its data ranks but for the padding of their shares. So a recipe that passes has a
layout that works, and its memory is known before there is a GPU.
"""

import os
from pathlib import Path

from qurl_megatron.actor.build import build_model, transformer_config
from qurl_megatron.actor.critic import ValueHead
from qurl_megatron.actor.megatron import Ranks
from qurl_megatron.actor.pretend import META, pretended_rank, without_gpus
from qurl_megatron.actor.trained import with_optimizer
from qurl_megatron.checkpoints.ops import parameter_count
from qurl_megatron.config import RunConfig
from qurl_megatron.schemes import SERVED
from qurl_megatron.tensors.arch import Arch
from qurl_megatron.training import memory
from qurl_megatron.training.alignment import alignment
from qurl_megatron.training.footprint import (
    NODE,
    EngineFootprint,
    Footprint,
    Holdings,
    Models,
    add_up,
    check_division,
    find_models,
)
from qurl_megatron.training.held import held
from qurl_megatron.training.memory import GIB, Held


def dry_run(
    config: RunConfig, model_config: Path | None = None, *, gpu_gib: float = 80
) -> Footprint:
    """Build every stage of a run without weights, and add up.

    Args:
        model_config: the model's config.json or the folder it is in; None takes that of
            ``model.path``, else one that ships under its name.
        gpu_gib: memory of a GPU, in GiB.

    Raises:
        ConfigError: no config is found, or the model does not divide over the ranks or engines.
    """
    models = find_models(config, model_config)
    check_division(config, models)
    return add_up(config, models, without_gpus(_built, config, models), gpu_gib=gpu_gib)


def _built(config: RunConfig, models: Models) -> Holdings:
    return [_stage_built(config, models, index) for index in range(config.parallel.pipeline)]


def _stage_built(config: RunConfig, models: Models, index: int) -> tuple[Held, Held | None]:
    parallel = config.parallel
    # Megatron numbers tensor ranks innermost and pipeline stages outermost.
    rank = index * (parallel.world_size // parallel.pipeline)
    with pretended_rank(parallel, rank) as ranks:
        assert (ranks.pipeline.rank, ranks.tensor.rank, ranks.data.rank) == (index, 0, 0)
        policy = _built_model(config, models.policy, ranks)
        critic = _built_model(config, models.critic, ranks, critic=True) if models.critic else None
    return policy, critic


def _built_model(config: RunConfig, arch: Arch, ranks: Ranks, *, critic: bool = False) -> Held:
    """One model with its optimizer; a critic is a body with a head of its own."""
    megatron = transformer_config(arch, config.model, config.parallel)
    with META:
        # A critic's body is never aligned.
        align = None if critic else alignment(config, ranks.device)
        gpt = build_model(arch, megatron, ranks, align=align)
        if critic and ranks.last_stage:
            gpt.output_layer = ValueHead(megatron, ranks)
    model, optimizer, _ = with_optimizer(gpt, megatron, config.optimizer)
    return held(model, optimizer)


def render(run: Footprint) -> str:
    """The tables, as text."""
    config, arch, parallel = run.config, run.arch, run.config.parallel
    to_be_made = "" if run.described_by.is_file() else ", to be made"
    lines = [
        f"{arch.family}, {_count(parameter_count(arch))} parameters, {arch.num_layers} layers: "
        f"{os.path.relpath(run.described_by)}{to_be_made}",
        f"{parallel.world_size} training ranks: tensor {parallel.tensor}, pipeline "
        f"{parallel.pipeline}, context {parallel.context}, data {parallel.data}",
        "",
        f"GiB per rank, passes of {run.tokens} tokens, activations "
        f"{'recomputed' if run.recompute else 'kept'}",
    ]
    rows = _stage_rows(run)
    label = max(len(name) for name, _ in rows)
    for name, cells in rows:
        lines.append(f"  {name:{label}}" + "".join(f"{cell:>9}" for cell in cells).rstrip())
    lines += ["", *_phase_lines(run)]
    if run.engine:
        lines += ["", *_engine_lines(config, run.engine)]
    lines += [f"note: {note}" for note in run.notes]
    return "\n".join(lines) + "\n"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"


def _stage_rows(run: Footprint) -> list[tuple[str, list[str]]]:
    stages = run.stages
    dtype = "BF16" if run.config.model.dtype == "bfloat16" else "FP32"

    def gib(size) -> list[str]:
        return [f"{size(stage) / GIB:.2f}" for stage in stages]

    rows = [
        ("pipeline stage", [str(index) for index in range(len(stages))]),
        ("layers", [str(stage.layers) for stage in stages]),
        ("parameters, millions", [f"{s.policy.parameters / 1e6:.0f}" for s in stages]),
        (f"weights, {dtype}", gib(lambda s: s.policy.weights)),
        ("gradients, FP32", gib(lambda s: s.policy.gradients)),
        ("masters, FP32", gib(lambda s: s.policy.masters)),
        ("Adam's moments, FP32", gib(lambda s: s.policy.moments)),
    ]
    if any(stage.reference for stage in stages):
        rows.append((f"reference, {dtype}", gib(lambda s: s.reference)))
    if any(stage.codes for stage in stages):
        rows.append((f"codes, {run.config.quant.scheme}, and scales", gib(lambda s: s.codes)))
    if stages[0].critic:
        rows.append(("critic, all of these", gib(lambda s: s.critic.total)))
    rows += [
        ("passes under way", [str(stage.passes) for stage in stages]),
        ("their activations", gib(lambda s: s.activations)),
        ("one layer's work", gib(lambda s: s.working)),
        ("logits", gib(lambda s: s.logits)),
        ("sum", gib(lambda s: s.total)),
        ("sum at rest", gib(lambda s: s.at_rest)),
    ]
    return rows


def _phase_lines(run: Footprint) -> list[str]:
    """The fullest rank's GPU and host, phase by phase."""
    stage, _, _ = run.fullest
    phases = run.phases(stage)
    names = list(dict.fromkeys(name for rows in phases.values() for name in rows))
    label = max(map(len, names))
    index = run.stages.index(stage)
    lines = [
        f"GiB on a GPU of stage {index}, of {run.gpu / GIB:g}",
        f"  {'phase':{label}}" + "".join(f"{phase:>9}" for phase in phases),
    ]
    for name in names:
        cells = [rows.get(name, 0) / GIB for rows in phases.values()]
        lines.append(f"  {name:{label}}" + "".join(f"{cell:9.2f}" for cell in cells))
    sums = [sum(rows.values()) / GIB for rows in phases.values()]
    lines.append(f"  {'sum':{label}}" + "".join(f"{cell:9.2f}" for cell in sums))
    host = memory.host(stage.policy)
    ranks = min(NODE, run.config.parallel.world_size)
    lines.append(
        f"host memory of a rank: {host['start'] / GIB:.1f} GiB while weights load, "
        f"{host['save'] / GIB:.1f} while a checkpoint is written or read; of {ranks} ranks on a "
        f"machine: {ranks * host['start'] / GIB:.0f} and {ranks * host['save'] / GIB:.0f}"
    )
    return lines


def _engine_lines(config: RunConfig, engine: EngineFootprint) -> list[str]:
    rollout = config.rollout
    count = rollout.engines
    placement = "beside a trainer at rest" if engine.colocated else "none of them the trainer's"
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    lines = [
        f"{count} SGLang engine{'s' if count > 1 else ''} of {rollout.engine_tensor} "
        f"GPU{'s' if rollout.engine_tensor > 1 else ''} each, {placement}: "
        f"{engine.room / GIB:.1f} GiB a GPU for weights and cache, "
        f"{engine.token / 1024:g} KiB a token of cache"
    ]
    for scheme in sorted(SERVED, key="none".__eq__):
        name = "BF16" if scheme == "none" else scheme.upper()
        tokens = engine.tokens(scheme)
        lines.append(
            f"  {name:5} weights {engine.weights[scheme] / GIB:6.2f} GiB, cache of "
            f"{tokens / 1000:6.0f} k tokens: {tokens // longest} responses of full length"
        )
    return lines
