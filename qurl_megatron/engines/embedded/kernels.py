"""W8A8 matrix products as pure functions, and the float ones they are measured against.

What is computed is ``quant.activations`` and ``quant.products``, which the trainer shares.

Without a GPU, weights are also kept in the layout that ``decode.cpp`` multiplies by
(``native.Blocks``) or, where that cannot run, oneDNN (``Packed``). Given the plain one, oneDNN
rearranges all of it for every product, which at 8 rows takes as long as the product.

Shapes: T tokens, I input and O output channels.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from qurl_megatron.engines.embedded import native
from qurl_megatron.quant.activations import magnitudes, token_codes, token_scales
from qurl_megatron.quant.products import rescaled, scaled_product
from qurl_megatron.schemes import SCHEMES

INT8, FP8 = SCHEMES["int8"], SCHEMES["fp8"]

# Below, the packed product's fixed cost of 10 microseconds is more than it saves.
PACK_FROM = 1 << 19  # codes of a matrix
U8_ZERO = 128  # what oneDNN adds to signed codes: it multiplies unsigned by signed ones


def quantize_int8(x_TI: Tensor, largest: float = INT8.largest) -> tuple[Tensor, Tensor]:
    """Codes [T, I] int8 of at most ``largest``, rounded half to even, and their scales [T, 1]."""
    scale_T1 = token_scales(magnitudes(x_TI), largest)
    return token_codes(x_TI, scale_T1, INT8), scale_T1


def quantize_fp8(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [T, I] float8_e4m3fn, rounded half to even, and their scales [T, 1]."""
    scale_T1 = token_scales(magnitudes(x_TI), FP8.largest)
    return token_codes(x_TI, scale_T1, FP8), scale_T1


@dataclass(frozen=True)
class Packed:
    """INT8 weights [O, I] in oneDNN's own layout, and their scales [O]."""

    blocks: Tensor  # opaque
    scale_O: Tensor
    zero_O: Tensor  # int32; the codes are symmetric

    def times(self, codes_TI: Tensor) -> Tensor:
        """[T, O] float32: the exact int32 product, rounded once, times the scales."""
        shifted_TI = codes_TI.view(torch.uint8) ^ U8_ZERO  # adds 128: the same bits but the first
        return torch.ops.onednn.qlinear_pointwise(
            *(shifted_TI, 1.0, U8_ZERO, self.blocks, self.scale_O, self.zero_O, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )


def pack(
    w_OI: Tensor, scale_O: Tensor, old: Packed | native.Blocks | None = None
) -> Packed | native.Blocks | None:
    """A copy to multiply by; None where the plain weights are as fast.

    Args:
        old: the copy of other weights in the same place, whose memory may serve again.
    """
    if w_OI.device.type == "cpu" and native.library() is not None:
        if isinstance(old, native.Blocks):
            old.fill(w_OI)
            return old
        return native.Blocks(w_OI, scale_O)
    if w_OI.device.type != "cpu" or w_OI.numel() < PACK_FROM or not _packed_product_is_exact():
        return None
    return _packed(w_OI, scale_O)


def _packed(w_OI: Tensor, scale_O: Tensor) -> Packed:
    blocks = torch.ops.onednn.qlinear_prepack(w_OI, None)
    return Packed(blocks, scale_O, torch.zeros(len(w_OI), dtype=torch.int32))


@functools.cache
def _packed_product_is_exact() -> bool:
    """Processors without VNNI add pairs of products in 16 bits, which overflow."""
    if not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return False
    largest = torch.full((64, 64), 127, dtype=torch.int8)
    product = _packed(largest, torch.ones(64)).times(largest)
    return bool((product == 64 * 127 * 127).all())


def int8_linear(
    x_TI: Tensor,
    w_OI: Tensor,
    scale_O: Tensor,
    addend: Tensor | None = None,
    largest: float = INT8.largest,
    packed: Packed | native.Blocks | None = None,
) -> Tensor:
    """INT8 product; with a smaller ``largest`` activation code, one of fewer bits in its place.

    Args:
        packed: the weights once more, of ``pack``; the result is the same to the last bit.
    """
    if isinstance(packed, native.Blocks):
        return packed.linear(x_TI, addend, largest).to(x_TI.dtype)
    codes_TI, scale_T1 = quantize_int8(x_TI, largest)
    if packed is None:
        return scaled_product(codes_TI, scale_T1, w_OI, scale_O, addend, x_TI.dtype)
    return rescaled(packed.times(codes_TI), scale_T1, addend, x_TI.dtype)


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
