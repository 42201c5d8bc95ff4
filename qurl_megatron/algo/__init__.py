"""The mathematics of the update: pure functions of tensors; a process group is an argument."""

from qurl_megatron.algo.advantages import ADVANTAGES, AdvantageKind, group_advantages
from qurl_megatron.algo.aggregate import AGGREGATIONS, AggregationKind, token_weights
from qurl_megatron.algo.kl import k1, k3
from qurl_megatron.algo.log_probs import token_log_probs
from qurl_megatron.algo.objective import (
    OBJECTIVES,
    ObjectiveKind,
    ObjectiveTerms,
    objective,
    objective_terms,
)

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "OBJECTIVES",
    "AdvantageKind",
    "AggregationKind",
    "ObjectiveKind",
    "ObjectiveTerms",
    "group_advantages",
    "k1",
    "k3",
    "objective",
    "objective_terms",
    "token_log_probs",
    "token_weights",
]
