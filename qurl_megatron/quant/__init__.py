"""INT8 and FP8 grids for rollout weights and activations; a process group is an argument."""

from qurl_megatron.quant.activations import quantize_tokens
from qurl_megatron.quant.diagnostics import code_flips, update_passed, weight_error, weight_update
from qurl_megatron.quant.rounding import Rounding, rounding_of
from qurl_megatron.quant.weights import QuantizedWeight, dequantize, quantize

__all__ = [
    "QuantizedWeight",
    "Rounding",
    "code_flips",
    "dequantize",
    "quantize",
    "quantize_tokens",
    "rounding_of",
    "update_passed",
    "weight_error",
    "weight_update",
]
