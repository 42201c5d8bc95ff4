"""Scores of responses: our kinds, and rewards of the user's own."""

from qurl_megatron.rewards.item import Item
from qurl_megatron.rewards.overlong import overlong_penalty
from qurl_megatron.rewards.pool import RewardPool, check_rewards, items_of
from qurl_megatron.rewards.verifiers import KINDS

__all__ = ["KINDS", "Item", "RewardPool", "items_of", "check_rewards", "overlong_penalty"]
