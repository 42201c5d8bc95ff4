"""INT8 and FP8 grids for rollout weights and activations; a process group is an argument."""

from qurl_megatron.quant.activations import quantize_tokens
from qurl_megatron.quant.diagnostics import (
    QUANT_METRICS,
    code_flips,
    quant_metrics,
    update_passed,
    weight_error,
    weight_update,
)
from qurl_megatron.quant.rounding import Rounding, rounding_of
from qurl_megatron.quant.weights import QuantizedWeight, dequantize, quantize

__all__ = [
    "QUANT_METRICS",
    "QuantizedWeight",
    "Rounding",
    "code_flips",
    "dequantize",
    "quant_metrics",
    "quantize",
    "quantize_tokens",
    "rounding_of",
    "update_passed",
    "weight_error",
    "weight_update",
]
