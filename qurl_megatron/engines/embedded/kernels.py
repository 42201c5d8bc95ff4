"""W8A8 matrix products as pure functions, and the float ones they are measured against.

They call ``quant.activations``, which the trainer shares.

Without a GPU, INT8 weights are also kept in the layout that ``decode.cpp`` multiplies by, where it
runs (``native.Blocks``).

Shapes: T tokens, I input and O output channels.
"""

import torch
from torch import Tensor

from qurl_megatron.engines.embedded import native
from qurl_megatron.quant import quantize_tokens
from qurl_megatron.quant.activations import scaled_product
from qurl_megatron.schemes import SCHEMES


def quantized_linear(
    x_TI: Tensor,
    w_OI: Tensor,
    scale_O: Tensor,
    addend: Tensor | None = None,
    *,
    scheme: str,
    blocks: native.Blocks | None = None,
) -> Tensor:
    """INT8 or FP8 product, or one of fewer bits in INT8's place.

    Args:
        w_OI: codes; of FP8 the same values in FP32 where the hardware has no float8.
        blocks: the weights once more, for ``decode.cpp``; the result is the same to the last bit.
    """
    if blocks is not None:
        return blocks.linear(x_TI, addend, SCHEMES[scheme].largest).to(x_TI.dtype)
    codes_TI, scale_T1 = quantize_tokens(x_TI, scheme)
    return scaled_product(codes_TI, scale_T1, w_OI, scale_O, addend, x_TI.dtype)


def float_linear(x_TI: Tensor, w_OI: Tensor, addend: Tensor | None = None) -> Tensor:
    if addend is None:
        return torch.nn.functional.linear(x_TI, w_OI)
    return torch.addmm(addend, x_TI, w_OI.t())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize in FP32, cast, then scale: the order Hugging Face models were trained with."""
    x32 = x.float()
    norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
    inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x32 * inverse).to(x.dtype).mul_(weight)
