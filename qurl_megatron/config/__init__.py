"""Recipes: TOML sections become frozen dataclasses; a key that no dataclass knows is an error."""

from qurl_megatron.config.algorithms import ALGORITHMS
from qurl_megatron.config.keys import Change, changes, refused
from qurl_megatron.config.load import RunConfig, load, to_toml
from qurl_megatron.config.sections import (
    AlgoConfig,
    CorrectionConfig,
    CriticConfig,
    DataConfig,
    GuardConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    QuantConfig,
    RewardConfig,
    RolloutConfig,
    SyncConfig,
    TrainConfig,
    WarmstartConfig,
)

__all__ = [
    "ALGORITHMS",
    "AlgoConfig",
    "Change",
    "CorrectionConfig",
    "CriticConfig",
    "DataConfig",
    "GuardConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "QuantConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SyncConfig",
    "TrainConfig",
    "WarmstartConfig",
    "changes",
    "load",
    "refused",
    "to_toml",
]
