"""Scores of responses, by our kinds and by users' rewards; environments that answer the policy.

Code of users runs in worker processes (``line_pool``, ``line_worker``), for both alike.
"""

from qurl_megatron.rewards.item import Item
from qurl_megatron.rewards.overlong import overlong_penalty
from qurl_megatron.rewards.pool import RewardPool, check_rewards, items_of
from qurl_megatron.rewards.verifiers import KINDS

__all__ = ["KINDS", "Item", "RewardPool", "items_of", "check_rewards", "overlong_penalty"]
