"""Recipes: TOML sections become frozen dataclasses; a key that no dataclass knows is an error."""

from qurl_megatron.config.algorithms import ALGORITHMS as ALGORITHMS
from qurl_megatron.config.keys import Change as Change
from qurl_megatron.config.keys import changes as changes
from qurl_megatron.config.keys import refused as refused
from qurl_megatron.config.load import RunConfig as RunConfig
from qurl_megatron.config.load import load as load
from qurl_megatron.config.load import to_toml as to_toml
from qurl_megatron.config.sections import AlgoConfig as AlgoConfig
from qurl_megatron.config.sections import CorrectionConfig as CorrectionConfig
from qurl_megatron.config.sections import CriticConfig as CriticConfig
from qurl_megatron.config.sections import DataConfig as DataConfig
from qurl_megatron.config.sections import GuardConfig as GuardConfig
from qurl_megatron.config.sections import ModelConfig as ModelConfig
from qurl_megatron.config.sections import OptimizerConfig as OptimizerConfig
from qurl_megatron.config.sections import ParallelConfig as ParallelConfig
from qurl_megatron.config.sections import QuantConfig as QuantConfig
from qurl_megatron.config.sections import RewardConfig as RewardConfig
from qurl_megatron.config.sections import RolloutConfig as RolloutConfig
from qurl_megatron.config.sections import SyncConfig as SyncConfig
from qurl_megatron.config.sections import TrainConfig as TrainConfig
from qurl_megatron.config.sections import WarmstartConfig as WarmstartConfig
