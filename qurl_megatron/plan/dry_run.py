"""``qurl show --dry-run``: the memory of each rank of a run, before there is a GPU."""

import os
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from qurl_megatron.checkpoints.ops import parameter_count
from qurl_megatron.config import RunConfig
from qurl_megatron.observe.text import how_many
from qurl_megatron.plan import memory
from qurl_megatron.plan.footprint import NODE, EngineFootprint, Footprint, footprint
from qurl_megatron.plan.memory import GIB
from qurl_megatron.schemes import SERVED
from qurl_megatron.training.shapes import find_models


def dry_run(
    config: RunConfig, model_config: Path | None = None, *, gpu_gib: float = 80
) -> Footprint:
    """Add up the memory of every pipeline stage, from the models' shapes alone.

    Args:
        model_config: the model's config.json or the folder it is in; None takes ``model.path``'s,
            else one that ships under its name.
        gpu_gib: memory of a GPU, in GiB.

    Raises:
        ConfigError: no config is found, or the model does not divide over the ranks or engines.
    """
    return footprint(config, find_models(config, model_config), gpu_gib=gpu_gib)


def render(run: Footprint) -> str:
    """The tables, as text."""
    config, arch, parallel = run.config, run.models.policy, run.config.parallel
    described_by = run.models.described_by
    to_be_made = "" if described_by.is_file() else ", to be made"
    lines = [
        f"{arch.family}, {_count(parameter_count(arch))} parameters, {arch.num_layers} layers: "
        f"{os.path.relpath(described_by)}{to_be_made}",
        f"{parallel.world_size} training ranks: tensor {parallel.tensor}, pipeline "
        f"{parallel.pipeline}, context {parallel.context}, data {parallel.data}",
        "",
        f"GiB per rank, passes of {run.tokens} tokens, activations "
        f"{'recomputed' if config.model.recompute else 'kept'}",
    ]
    lines += _table([_column(run, index) for index in range(len(run.stages))])
    lines += ["", *_phase_lines(run)]
    if run.engine:
        lines += ["", *_engine_lines(run, run.engine)]
    lines += [f"note: {note}" for note in run.notes]
    return "\n".join(lines) + "\n"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _table(columns: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the lines of a table, from the cells of each column by the label of their row."""
    width = max(map(len, columns[0]))
    lines = []
    for label in columns[0]:
        cells = "".join(f"{column[label]:>9}" for column in columns)
        lines.append(f"  {label:{width}}{cells}")
    return lines


def _column(run: Footprint, index: int) -> dict[str, str]:
    """Return the cells of one pipeline stage, by the label of their row."""
    stage = run.stages[index]
    policy, critic = stage.policy, stage.critic
    dtype = "BF16" if run.config.model.dtype == "bfloat16" else "FP32"
    held = {
        f"weights, {dtype}": policy.weights,
        "gradients, FP32": policy.gradients,
        "masters, FP32": policy.masters,
        "Adam's moments, FP32": policy.moments,
    }
    if any(each.reference for each in run.stages):
        held[f"reference, {dtype}"] = stage.reference
    if any(each.codes for each in run.stages):
        held[f"codes, {run.config.quant.scheme}, and scales"] = stage.codes
    if critic:
        held["critic, all of these"] = critic.total
    passing = {
        "their activations": stage.activations,
        "one layer's work": stage.working,
        "logits": stage.logits,
        "sum": stage.total,
        "sum at rest": stage.at_rest,
    }
    return {
        "pipeline stage": str(index),
        "layers": str(stage.layers),
        "parameters, millions": f"{policy.parameters / 1e6:.0f}",
        **{name: _gib(size) for name, size in held.items()},
        "passes under way": str(stage.passes),
        **{name: _gib(size) for name, size in passing.items()},
    }


def _phase_lines(run: Footprint) -> list[str]:
    """The fullest rank's GPU and host, phase by phase."""
    stage, _, _ = run.fullest
    phases = run.phases(stage)
    names = list(dict.fromkeys(chain.from_iterable(phases.values())))
    columns = []
    for phase, sizes in phases.items():
        column = {"phase": phase}
        for name in names:
            column[name] = _gib(sizes.get(name, 0))
        columns.append(column | {"sum": _gib(sum(sizes.values()))})
    lines = [f"GiB on a GPU of stage {run.stages.index(stage)}, of {run.gpu / GIB:g}"]
    lines += _table(columns)
    host = memory.host(stage.policy)
    ranks = min(NODE, run.config.parallel.world_size)
    lines.append(
        f"host memory of a rank: {host['start'] / GIB:.1f} GiB while weights load, "
        f"{host['save'] / GIB:.1f} while a checkpoint is written or read; of {ranks} ranks on a "
        f"machine: {ranks * host['start'] / GIB:.0f} and {ranks * host['save'] / GIB:.0f}"
    )
    return lines


def _engine_lines(run: Footprint, engine: EngineFootprint) -> list[str]:
    rollout = run.config.rollout
    placement = "beside a trainer at rest" if engine.colocated else "none of them the trainer's"
    lines = [
        f"{how_many(rollout.engines, 'SGLang engine')} of "
        f"{how_many(rollout.engine_tensor, 'GPU')} each, {placement}: "
        f"{engine.room / GIB:.1f} GiB a GPU for weights and cache, "
        f"{engine.token / 1024:g} KiB a token of cache"
    ]
    for scheme in sorted(SERVED, key="none".__eq__):
        name = "BF16" if scheme == "none" else scheme.upper()
        tokens = engine.tokens(scheme)
        lines.append(
            f"  {name:5} weights {engine.weights[scheme] / GIB:6.2f} GiB, cache of "
            f"{tokens / 1000:6.0f} k tokens: {tokens // run.longest} responses of full length"
        )
    return lines
