"""W8A8 matrix products as pure functions, and the float ones they are measured against.

They call ``quant.activations``, which the trainer shares.

Without a GPU, INT8 weights are also kept in the layout that ``decode.cpp`` multiplies by, where it
runs (``native.Blocks``).

Shapes: T tokens, I input and O output channels.
"""

import torch
from torch import Tensor

from qurl_megatron.engines.embedded import native
from qurl_megatron.quant.activations import (
    magnitudes,
    scaled_product,
    token_codes,
    token_scales,
)
from qurl_megatron.schemes import SCHEMES

INT8, FP8 = SCHEMES["int8"], SCHEMES["fp8"]


def quantize_int8(x_TI: Tensor, largest: float = INT8.largest) -> tuple[Tensor, Tensor]:
    """Return codes [T, I] int8 up to ``largest``, rounded half to even, and their scales [T, 1]."""
    scale_T1 = token_scales(magnitudes(x_TI), largest)
    return token_codes(x_TI, scale_T1, INT8), scale_T1


def quantize_fp8(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [T, I] float8_e4m3fn, rounded half to even, and their scales [T, 1]."""
    scale_T1 = token_scales(magnitudes(x_TI), FP8.largest)
    return token_codes(x_TI, scale_T1, FP8), scale_T1


def int8_linear(
    x_TI: Tensor,
    w_OI: Tensor,
    scale_O: Tensor,
    addend: Tensor | None = None,
    largest: float = INT8.largest,
    blocks: native.Blocks | None = None,
) -> Tensor:
    """INT8 product; with a smaller ``largest`` activation code, one of fewer bits in its place.

    Args:
        blocks: the weights once more, for ``decode.cpp``; the result is the same to the last bit.
    """
    if blocks is not None:
        return blocks.linear(x_TI, addend, largest).to(x_TI.dtype)
    codes_TI, scale_T1 = quantize_int8(x_TI, largest)
    return scaled_product(codes_TI, scale_T1, w_OI, scale_O, addend, x_TI.dtype)


def fp8_linear(x_TI: Tensor, w_OI: Tensor, scale_O: Tensor, addend: Tensor | None = None) -> Tensor:
    """E4M3 product; ``w_OI`` is float8 where the hardware has it, else the same values in FP32."""
    codes_TI, scale_T1 = quantize_fp8(x_TI)
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
