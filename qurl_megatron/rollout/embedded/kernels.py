"""W8A8 matrix products as pure functions, and the float ones they are measured against.

    y[t, o] = (sum_i a[t, i] * w[o, i]) * weight_scale[o] * scale[t] + addend[t, o]

``a`` are the activations of token t, quantized on the fly with one scale per token. The sum is
exact in INT8 (int32 accumulator). ``addend`` is a bias or the residual stream: folding it in saves
one pass over memory and one rounding.

Shapes: T tokens, I input and O output channels.
"""

import functools

import torch
from torch import Tensor

INT8_MAX = 127.0
FP8_MAX = 448.0  # largest finite E4M3 value
TINY = torch.finfo(torch.float32).tiny

# cuBLASLt's int8 product wants more than 16 rows; padded rows are cut off again.
CUDA_INT8_ROWS = 32


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


def int8_linear(
    x_TI: Tensor,
    w_OI: Tensor,
    scale_O: Tensor,
    addend: Tensor | None = None,
    largest: float = INT8_MAX,
) -> Tensor:
    """INT8 product; with a smaller ``largest`` activation code, one of fewer bits in its place."""
    codes_TI, scale_T1 = quantize_int8(x_TI, largest)
    return _rescale(int8_matmul(codes_TI, w_OI), scale_T1, scale_O, addend, x_TI.dtype)


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
    return _rescale(codes_TI.float() @ w_OI.t(), scale_T1, scale_O, addend, x_TI.dtype)


def float_linear(x_TI: Tensor, w_OI: Tensor, addend: Tensor | None = None) -> Tensor:
    if addend is None:
        return torch.nn.functional.linear(x_TI, w_OI)
    return torch.addmm(addend, x_TI, w_OI.t())


def _rescale(
    sum_TO: Tensor, scale_T1: Tensor, scale_O: Tensor, addend: Tensor | None, dtype: torch.dtype
) -> Tensor:
    y_TO = sum_TO.float().mul_(scale_O)
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
