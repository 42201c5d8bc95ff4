"""The shapes of the models that a run trains, and whether a layout divides them; without torch."""

from dataclasses import dataclass, replace
from pathlib import Path

from qurl_megatron.checkpoints.places import description_of
from qurl_megatron.config import RunConfig
from qurl_megatron.kit.disk import read_json
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.shipped import ROOT
from qurl_megatron.tensors.arch import Arch, arch_of, read_arch

SHAPES = ROOT / "launch/models"
"""config.json of the models that recipes name, for machines without their weights."""


@dataclass(frozen=True)
class Models:
    """The shapes of the models that a run trains."""

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
        policy = critic = read_arch(shape_of(config.data, config.warmstart))
    else:
        path = _find("model.path", config.model.path, model_config)
        policy = critic = read_arch(read_json(path))
    if config.algo.advantage != "gae":
        return Models(path, policy, None)
    if config.critic.path:
        critic = read_arch(read_json(_find("critic.path", config.critic.path, None)))
    return Models(path, policy, replace(critic, tied=False))


def check_division(config: RunConfig, models: Models) -> None:
    """Refuse a layout that the models do not divide over.

    Raises:
        ConfigError: policy or critic do not divide over the ranks, or Megatron does not compute
            them so.
    """
    _check_megatron(config, models.policy)
    if not engine_divides(models.policy, config.engine_tensor):
        raise ConfigError(
            f"rollout.engine_tensor={config.engine_tensor} does not divide the model's "
            f"num_attention_heads={models.policy.heads} and "
            f"num_key_value_heads={models.policy.kv_heads}"
        )
    if models.critic:
        try:
            _check_megatron(config, models.critic)
        except ConfigError as error:
            raise ConfigError(f"critic.path={config.critic.path}: {error}") from None


def check_layout(config: RunConfig) -> None:
    """``check_division``, as far as it takes a moment: of models whose sizes are known.

    Raises:
        ConfigError: as ``check_division``; a config.json that is there cannot be read.
    """
    path = Path(config.model.path)
    if path.exists() or _shipped(path).is_file():
        check_division(config, find_models(config))


def engine_divides(arch: Arch, tensor: int) -> bool:
    """Whether an engine of ``tensor`` GPUs can split the heads; keys and values may be shared."""
    return not (arch.heads % tensor or (arch.kv_heads % tensor and tensor % arch.kv_heads))


def _check_megatron(config: RunConfig, arch: Arch) -> None:
    parallel = config.parallel
    arch.check_parallel(parallel.tensor, parallel.pipeline)
    arch.check_megatron(parallel.tensor, sequence=parallel.sequence)


def _find(key: str, model_path: str, given: Path | None) -> Path:
    """The config.json of the checkpoint that ``key`` names."""
    if given is not None:
        path = given / "config.json" if given.is_dir() else given
        if not path.is_file():
            raise ConfigError(f"--config {given} is neither a config.json nor a folder with one")
        return path
    folder = Path(model_path)
    if folder.exists():
        folder = description_of(folder)
        arch_of(folder)  # raises the fault of a broken folder
        return folder / "config.json"
    shipped = _shipped(folder)
    if not shipped.is_file():
        shapes = ", ".join(sorted(p.name for p in SHAPES.glob("*/")))
        raise ConfigError(
            f"{key}={model_path} does not exist, and launch/models has no {folder.name} "
            f"(but {shapes}); name the model's config.json with --config"
        )
    return shipped


def _shipped(model_path: Path) -> Path:
    """The config.json that ships for a model of that name, where one does."""
    return SHAPES / model_path.name / "config.json"
