"""Products of quantized tokens and weights, the same for the embedded engine and the trainer.

    y[t, o] = (sum_i a[t, i] * w[o, i]) * weight_scale[o] * scale[t] + addend[t, o]

The sum is exact in INT8 (int32 accumulator), so only the order of scaling is left to agree on.

Shapes: T tokens, I input and O output channels.
"""

import functools

import torch
from torch import Tensor

# cuBLASLt's int8 product wants more than 16 rows, and its FP8 product sides of whole steps; padded
# rows are cut off again.
CUDA_INT8_ROWS = 32
CUDA_STEP = 16


def scaled_product(
    codes_TI: Tensor,
    scale_T1: Tensor,
    w_OI: Tensor,
    scale_O: Tensor,
    addend: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """[T, O] of ``dtype``, by the machine's products of 8 bits where it has them.

    FP8 is emulated elsewhere: rounded exactly where the hardware rounds (the codes) and summed in
    FP32, so it differs from a tensor core in the order of summation only.

    Args:
        w_OI: the codes of the weight; of FP8 also as the same values in FP32.
        addend: a bias [O] or the residual stream [T, O]; None: nothing. Folding it in saves one
            pass over memory and one rounding.
    """
    fits = not w_OI.is_cuda or not (w_OI.shape[0] % CUDA_STEP or w_OI.shape[1] % CUDA_STEP)
    if w_OI.dtype is torch.float8_e4m3fn and fits and has_fp8_hardware(w_OI.device):
        # Row-wise scales exist for BF16 results only.
        y_TO = torch._scaled_mm(
            codes_TI, w_OI.t(), scale_a=scale_T1, scale_b=scale_O[None], out_dtype=torch.bfloat16
        ).to(dtype)
        return y_TO if addend is None else y_TO + addend
    if w_OI.dtype is torch.int8 and fits:
        y_TO = int8_matmul(codes_TI, w_OI).float()
    else:
        y_TO = codes_TI.float() @ w_OI.float().t()
    y_TO = y_TO.mul_(scale_O)
    if addend is None:
        return y_TO.mul_(scale_T1).to(dtype)
    return torch.addcmul(addend.to(torch.float32), y_TO, scale_T1).to(dtype)


def int8_matmul(a_TI: Tensor, w_OI: Tensor) -> Tensor:
    """Exact int32 product of int8 codes, [T, O]."""
    rows = a_TI.shape[0]
    if a_TI.is_cuda and rows < CUDA_INT8_ROWS:
        a_TI = torch.nn.functional.pad(a_TI, (0, 0, 0, CUDA_INT8_ROWS - rows))
    return torch._int_mm(a_TI, w_OI.t())[:rows]


@functools.cache
def has_fp8_hardware(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
