"""The shapes of the models that a run trains, and whether a layout divides them; without torch."""

from dataclasses import dataclass, replace
from pathlib import Path

from qurl_megatron.checkpoints.ops import hf_shapes
from qurl_megatron.checkpoints.places import description_of
from qurl_megatron.config import ParallelConfig, RunConfig
from qurl_megatron.kit.disk import read_json
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.shipped import ROOT
from qurl_megatron.schemes import SCALES, SCHEMES
from qurl_megatron.tensors.arch import Arch, arch_of, read_arch
from qurl_megatron.tensors.table import hf_tensor, is_expert, is_quantized

SHAPES = ROOT / "launch/models"
"""config.json of the models that recipes name, for machines without their weights."""


@dataclass(frozen=True)
class Models:
    described_by: Path  # the policy's config.json
    policy: Arch
    critic: Arch | None


def find_models(config: RunConfig, model_config: Path | None = None) -> Models:
    """Read the shapes of the models that a run trains.

    Args:
        model_config: the model's config.json or the folder it is in; None takes ``model.path``'s,
            else the shape that a warm start would make there, else one that ships under its name.

    Raises:
        ConfigError: no config is found.
    """
    if model_config is None and config.warmstart.steps and not Path(config.model.path).exists():
        from qurl_megatron.training.warmstart import shape_of  # it needs torch

        path = Path(config.model.path) / "config.json"
        policy = read_arch(shape_of(config.data, config.warmstart))
    else:
        path = _find(config.model.path, model_config)
        policy = read_arch(read_json(path))
    if config.algo.advantage != "gae":
        return Models(path, policy, None)
    return Models(path, policy, replace(policy, tied=False))


def check_computed(config: RunConfig, arch: Arch) -> None:
    """Raise ``ConfigError`` where no layout can compute the model by this recipe."""
    arch.check_megatron()
    if config.model.routing_replay != "off" and not arch.experts:
        raise ConfigError(
            f"model.routing_replay={config.model.routing_replay} replays the choice of experts, "
            f"and a {arch.family} model has none; leave it out"
        )
    if config.model.router_aux_loss != "off" and not arch.experts:
        raise ConfigError(
            f"model.router_aux_loss={config.model.router_aux_loss} balances experts, and a "
            f"{arch.family} model has none; leave it out"
        )
    if arch.experts and config.train.align == "full":
        raise ConfigError(
            f"model.path={config.model.path}: train.align=full cannot compute experts as the "
            "engines do, which weigh an expert's output where Megatron-Core weighs what its second "
            "product takes; set train.align=weights"
        )


def check_division(
    config: RunConfig,
    arch: Arch,
    parallel: ParallelConfig | None = None,
    engine_tensor: int | None = None,
) -> None:
    """Raise ``ConfigError`` where the model does not divide over the ranks of trainer or engines,
    or cannot be computed by this recipe.

    Args:
        parallel, engine_tensor: sizes in place of the configuration's.
    """
    parallel = parallel or config.parallel
    engine_tensor = engine_tensor or config.engine_tensor
    arch.check_parallel(parallel.tensor, parallel.pipeline, parallel.expert)
    check_computed(config, arch)
    dealt = config.rollout.deals_experts
    if not engine_divides(arch, engine_tensor, whole_experts=dealt):
        sizes = f"num_attention_heads={arch.heads} and num_key_value_heads={arch.kv_heads}"
        if arch.experts and not dealt:
            sizes += f", or its moe_intermediate_size={arch.experts.intermediate}"
        if arch.experts and arch.experts.shared:
            sizes += f", or its shared_expert_intermediate_size={arch.experts.shared}"
        fitting = [
            n for n in range(1, arch.heads + 1) if engine_divides(arch, n, whole_experts=dealt)
        ]
        raise ConfigError(
            f"rollout.engine_tensor={engine_tensor} does not divide the model's {sizes}; "
            f"use one of {fitting}"
        )
    if SCHEMES[config.quant.scheme].block:
        _refuse_cut_squares(config, arch, parallel, engine_tensor)


def _refuse_cut_squares(
    config: RunConfig, arch: Arch, parallel: ParallelConfig, engines: int
) -> None:
    """Raise ``ConfigError`` where a rank of trainer or engines would have a part of a square that
    shares a scale, or SGLang would fuse projections in the middle of one."""
    for name in hf_shapes(replace(arch, num_layers=1)):
        if not is_quantized(name):
            continue
        scale = hf_tensor(arch, name + SCALES[1])
        units = scale.units
        assert units is not None
        trainers = parallel.expert_tensor if is_expert(name) else parallel.tensor
        scale.part(0, units.length // trainers, "a smaller parallel.tensor")
        dealt = is_expert(name) and config.rollout.deals_experts
        length = units.length // (1 if dealt else engines)
        if units.repeats and engines > units.count:
            length = units.width
        scale.part(0, length, "a smaller rollout.engine_tensor")
        if scale.split_dim == 0 and config.rollout.kind.fuses and length % scale.block:
            raise ConfigError(
                f"SGLang fuses {name} with others after its {length} rows, which are not a "
                f"multiple of {scale.block}, and so cannot serve quant.scheme=fp8_block; use "
                "quant.scheme=fp8"
            )


def engine_divides(arch: Arch, tensor: int, *, whole_experts: bool = False) -> bool:
    """Return whether an engine of ``tensor`` GPUs can split the heads and every expert; keys and
    values may be shared.

    Args:
        whole_experts: experts are dealt whole to the GPUs instead, except a shared one.
    """
    split = [arch.heads]
    if arch.experts:
        split += [arch.experts.shared, 0 if whole_experts else arch.experts.intermediate]
    if any(size % tensor for size in split):
        return False
    return not (arch.kv_heads % tensor and tensor % arch.kv_heads)


def _find(model_path: str, override: Path | None) -> Path:
    """Return the config.json of ``model.path``."""
    if override is not None:
        path = override / "config.json" if override.is_dir() else override
        if not path.is_file():
            raise ConfigError(f"--config {override} is neither a config.json nor a folder with one")
        return path
    folder = Path(model_path)
    if folder.exists():
        folder = description_of(folder)
        arch_of(folder)  # raises the fault of a broken folder
        return folder / "config.json"
    shipped = SHAPES / folder.name / "config.json"
    if not shipped.is_file():
        shapes = ", ".join(sorted(p.name for p in SHAPES.glob("*/")))
        raise ConfigError(
            f"model.path={model_path} does not exist, and launch/models has no {folder.name} "
            f"(but {shapes}); name the model's config.json with --config"
        )
    return shipped
