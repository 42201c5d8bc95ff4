"""Recipes: TOML sections become frozen dataclasses; a key that no dataclass knows is an error."""

from qurl_megatron.config.load import RunConfig, differences, load, to_toml
from qurl_megatron.config.sections import (
    AlgoConfig,
    CheckpointConfig,
    DataConfig,
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
    "AlgoConfig",
    "CheckpointConfig",
    "DataConfig",
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
    "differences",
    "load",
    "to_toml",
]
