"""What answers the policy between its turns: a tool, or a user, written by the recipe's user."""

from qurl_megatron.environments.environment_pool import EnvironmentPool, check_environment

__all__ = ["EnvironmentPool", "check_environment"]
