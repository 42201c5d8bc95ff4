"""The mathematics of the update: pure functions of tensors; a process group is an argument."""

from qurl_megatron.algo.advantages import (
    ADVANTAGES,
    ESTIMATES,
    AdvantageKind,
    at_last_token,
    discounted_returns,
    gae,
    group_advantages,
    token_advantages,
    whitened,
)
from qurl_megatron.algo.aggregate import AGGREGATIONS, AggregationKind, token_weights
from qurl_megatron.algo.kl import ESTIMATORS, EstimatorKind, k1, k2, k3, kl_penalty
from qurl_megatron.algo.log_probs import token_log_probs
from qurl_megatron.algo.objective import (
    OBJECTIVES,
    SURROGATES,
    Limits,
    ObjectiveKind,
    ObjectiveTerms,
    SurrogateKind,
    importance_weights,
    objective,
    objective_terms,
)
from qurl_megatron.algo.own_loss import LossInputs
from qurl_megatron.algo.ratios import (
    LEVELS,
    MAX_LOG_RATIO,
    RATIOS,
    RatioKind,
    RhoLevel,
    bounded_exp,
    importance_ratio,
)
from qurl_megatron.algo.rejection import kept
from qurl_megatron.algo.segments import (
    mean_per_response,
    owners_of,
    padded,
    sum_per_response,
    unpadded,
)
from qurl_megatron.algo.values import value_loss

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "ESTIMATES",
    "ESTIMATORS",
    "LEVELS",
    "MAX_LOG_RATIO",
    "OBJECTIVES",
    "RATIOS",
    "SURROGATES",
    "AdvantageKind",
    "AggregationKind",
    "EstimatorKind",
    "Limits",
    "LossInputs",
    "ObjectiveKind",
    "ObjectiveTerms",
    "RatioKind",
    "RhoLevel",
    "SurrogateKind",
    "at_last_token",
    "bounded_exp",
    "discounted_returns",
    "gae",
    "group_advantages",
    "importance_ratio",
    "importance_weights",
    "k1",
    "k2",
    "k3",
    "kept",
    "kl_penalty",
    "mean_per_response",
    "objective",
    "objective_terms",
    "owners_of",
    "padded",
    "sum_per_response",
    "token_advantages",
    "token_log_probs",
    "token_weights",
    "unpadded",
    "value_loss",
    "whitened",
]
