"""The mathematics of the update: pure functions of tensors; a process group is an argument."""

from qurl_megatron.algo.log_probs import token_log_probs
from qurl_megatron.algo.objective import objective
from qurl_megatron.algo.own_loss import LossInputs

__all__ = ["LossInputs", "objective", "token_log_probs"]
