"""Scores of responses against reference answers."""

from qurl_megatron.rewards.kinds import KINDS
from qurl_megatron.rewards.overlong import overlong_penalty
from qurl_megatron.rewards.pool import RewardPool

__all__ = ["KINDS", "RewardPool", "overlong_penalty"]
