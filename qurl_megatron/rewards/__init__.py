"""Scores of responses, by our kinds and by users' rewards; environments that answer the policy.

Users' code runs in worker processes (``workers``), for rewards and environments alike.
"""

from qurl_megatron.rewards.pool import Item, RewardPool, check_rewards
from qurl_megatron.rewards.verifiers import KINDS, overlong_penalty

__all__ = ["KINDS", "Item", "RewardPool", "check_rewards", "overlong_penalty"]
