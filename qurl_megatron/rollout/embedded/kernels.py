"""W8A8 matrix products as pure functions, and the float ones they are measured against.

    y[t, o] = (sum_i a[t, i] * w[o, i]) * weight_scale[o] * scale[t] + addend[t, o]

``a`` are the activations of token t, quantized on the fly with one scale per token. The sum is
exact in INT8 (int32 accumulator). ``addend`` is a bias or the residual stream: folding it in saves
one pass over memory and one rounding.

Without a GPU, weights are also kept in the layout that ``decode.cpp`` multiplies by
(``native.Blocks``) or, where that cannot run, oneDNN (``Packed``); with AMX, in both. Given the
plain one, oneDNN rearranges all of it for every product, which at 8 rows takes as long as the
product.

Shapes: T tokens, I input and O output channels.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from qurl_megatron.rollout.embedded import native

INT8_MAX = 127.0
FP8_MAX = 448.0  # largest finite E4M3 value
TINY = torch.finfo(torch.float32).tiny

# cuBLASLt's int8 product wants more than 16 rows; padded rows are cut off again.
CUDA_INT8_ROWS = 32

# Below, the packed product's fixed cost of 10 microseconds is more than it saves.
PACK_FROM = 1 << 19  # codes of a matrix
AMX_FROM = 65  # rows, as prefills have them
U8_ZERO = 128  # what oneDNN adds to signed codes: it multiplies unsigned by signed ones


def token_scales(x_TI: Tensor, largest: float) -> Tensor:
    """[T, 1] float32 scales that map each token's largest magnitude to ``largest``.

    An all-zero token gets a tiny positive scale: its codes are 0 under any scale, and none is NaN.
    """
    return x_TI.abs().amax(dim=-1, keepdim=True).float().div_(largest).clamp_(min=TINY)


def quantize_int8(x_TI: Tensor, largest: float = INT8_MAX) -> tuple[Tensor, Tensor]:
    """Codes [T, I] int8 of at most ``largest``, rounded half to even, and their scales [T, 1].

    No clamp is needed: |x| / scale <= largest up to one rounding, which rounds to it.
    """
    scale_T1 = token_scales(x_TI, largest)
    return x_TI.div(scale_T1).round_().to(torch.int8), scale_T1


def quantize_fp8(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [T, I] float8_e4m3fn, rounded half to even, and their scales [T, 1]."""
    scale_T1 = token_scales(x_TI, FP8_MAX)
    return x_TI.div(scale_T1).to(torch.float8_e4m3fn), scale_T1


def int8_matmul(a_TI: Tensor, w_OI: Tensor) -> Tensor:
    """Exact int32 product of int8 codes, [T, O]."""
    rows = a_TI.shape[0]
    if a_TI.is_cuda and rows < CUDA_INT8_ROWS:
        a_TI = torch.nn.functional.pad(a_TI, (0, 0, 0, CUDA_INT8_ROWS - rows))
    return torch._int_mm(a_TI, w_OI.t())[:rows]


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


class WithAmx(native.Blocks):
    """Blocks for few rows; for many also oneDNN's copy, whose products use AMX."""

    def fill(self, w_OI: Tensor) -> None:
        super().fill(w_OI)
        self.for_many_rows = _packed(w_OI, self._scale_O)


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
        amx = "amx_int8" in native.instructions() and w_OI.numel() >= PACK_FROM
        kind = WithAmx if amx and _packed_product_is_exact() else native.Blocks
        return kind(w_OI, scale_O)
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
    largest: float = INT8_MAX,
    packed: Packed | native.Blocks | None = None,
) -> Tensor:
    """INT8 product; with a smaller ``largest`` activation code, one of fewer bits in its place.

    Args:
        packed: the weights once more, of ``pack``; the result is the same to the last bit.
    """
    if isinstance(packed, WithAmx) and len(x_TI) >= AMX_FROM:
        packed = packed.for_many_rows
    if isinstance(packed, native.Blocks):
        return packed.linear(x_TI, addend, largest).to(x_TI.dtype)
    codes_TI, scale_T1 = quantize_int8(x_TI, largest)
    if packed is None:
        scaled_TO = int8_matmul(codes_TI, w_OI).float().mul_(scale_O)
    else:
        scaled_TO = packed.times(codes_TI)
    return _rescale(scaled_TO, scale_T1, addend, x_TI.dtype)


def fp8_linear(x_TI: Tensor, w_OI: Tensor, scale_O: Tensor, addend: Tensor | None = None) -> Tensor:
    """E4M3 product; ``w_OI`` is float8 where the hardware has it, else the same values in FP32.

    The emulation rounds exactly where the hardware does (the codes) and sums in FP32, so it differs
    from a tensor core in the order of summation only.
    """
    codes_TI, scale_T1 = quantize_fp8(x_TI)
    if w_OI.dtype is torch.float8_e4m3fn:
        # Row-wise scales exist for BF16 results only.
        y_TO = torch._scaled_mm(
            codes_TI, w_OI.t(), scale_a=scale_T1, scale_b=scale_O[None], out_dtype=torch.bfloat16
        ).to(x_TI.dtype)
        return y_TO if addend is None else y_TO + addend
    y_TO = (codes_TI.float() @ w_OI.t()).mul_(scale_O)
    return _rescale(y_TO, scale_T1, addend, x_TI.dtype)


def float_linear(x_TI: Tensor, w_OI: Tensor, addend: Tensor | None = None) -> Tensor:
    if addend is None:
        return torch.nn.functional.linear(x_TI, w_OI)
    return torch.addmm(addend, x_TI, w_OI.t())


def _rescale(y_TO: Tensor, scale_T1: Tensor, addend: Tensor | None, dtype: torch.dtype) -> Tensor:
    if addend is None:
        return y_TO.mul_(scale_T1).to(dtype)
    return torch.addcmul(addend.to(torch.float32), y_TO, scale_T1).to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize in FP32, cast, then scale: the order Hugging Face models were trained with."""
    x32 = x.float()
    norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
    inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x32 * inverse).to(x.dtype).mul_(weight)


@functools.cache
def has_fp8_hardware(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
