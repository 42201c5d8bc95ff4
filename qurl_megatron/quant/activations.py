"""Activations on the fly, one scale per token found from the token itself, and their products.

    y[t, o] = (sum_i a[t, i] * w[o, i]) * weight_scale[o] * scale[t] + addend[t, o]

With a scale per square of the weight, and per token and group of as many features, ``g``:

    y[t, o] = sum_g (sum_(i in g) a[t, i] * w[o, i]) * weight_scale[o, g] * scale[t, g] + addend

The one definition of both, for the embedded engine, for the trainer where it computes as the
engines do, and for tests of parity. The native decode step does the same to the last bit. SGLang's
kernels for GPUs have formulas of their own: they multiply by reciprocals, and round halves of INT8
away from zero. Without a GPU, SGLang is given the embedded engine's kernels.

Shapes: T tokens, I input and O output features.
"""

import functools
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from qurl_megatron.quant.rounding import round_to_grid_, scheme_named
from qurl_megatron.schemes import BLOCK, Scheme

Arithmetic = Literal["exact", "sglang"]
"""Whose: "exact" divides by the scale and rounds half to even; "sglang" follows its GPU kernels, as
of 0.5.23 (``_per_token_quant_int8``, ``per_token_quant_fp8``)."""

TINY = torch.finfo(torch.float32).tiny
# cuBLASLt's int8 product wants more than 16 rows, and its FP8 product sides of whole steps; padded
# rows are cut off again.
CUDA_INT8_ROWS = 32
CUDA_STEP = 16

EXACT_IN_FP32 = 1024  # products of int8 codes, whose sum is at most 1024 * 128**2 = 2**24

SGLANG_LEAST = 1e-10  # largest magnitude of a token that SGLang's INT8 kernel tells from zeros


def quantize_tokens(
    x: Tensor, scheme: str, *, arithmetic: Arithmetic = "exact", amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``(values, scale)`` with ``values * scale`` nearest to each token.

    Args:
        x: [..., features] in any float format; not modified.
        scheme: "int8", "fp8" or a simulated one for one scale per token, [..., 1]; "fp8_block" for
            one per token and group of 128 features, [..., ceil(features / 128)].
        arithmetic: "sglang" is there for "int8" and "fp8".
        amax: largest magnitude of each token, [..., 1], where ``x`` holds a part of its features.

    Not checked for inf and nan, which would cost a synchronisation per layer: they make the scale
    inf or nan, and so everything computed with it.
    """
    rules, x = scheme_named(scheme), x.detach()
    if rules.block is not None:
        return _in_groups(x, rules, rules.block)
    amax = magnitudes(x) if amax is None else amax
    if arithmetic == "sglang":
        return _as_sglang(x.float(), amax, rules)
    scale = token_scales(amax, rules.largest)
    return token_codes(x, scale, rules), scale


def magnitudes(x: Tensor) -> Tensor:
    """Largest magnitude of each token, [..., 1] float32; nan where it has one."""
    return x.abs().amax(dim=-1, keepdim=True).float()


def token_scales(amax: Tensor, largest: float) -> Tensor:
    """float32 scales that map each token's largest magnitude to ``largest``.

    A token of zeros gets a tiny positive scale: its codes are 0 under any scale, and none is NaN.
    """
    # By a tensor, as in ``rounding.scale_of``.
    return (amax / amax.new_full((), largest)).clamp_(min=TINY)


def token_codes(x: Tensor, scale: Tensor, rules: Scheme) -> Tensor:
    """The codes of tokens under their scales, rounded half to even; nothing needs to be clamped."""
    return round_to_grid_(x / scale, rules).to(rules.dtype)


def _in_groups(x: Tensor, rules: Scheme, width: int) -> tuple[Tensor, Tensor]:
    features = x.shape[-1]
    groups = F.pad(x, (0, -features % width)).unflatten(-1, (-1, width))
    scale = token_scales(magnitudes(groups), rules.largest)
    return token_codes(groups, scale, rules).flatten(-2)[..., :features], scale.squeeze(-1)


def _as_sglang(x: Tensor, amax: Tensor, rules: Scheme) -> tuple[Tensor, Tensor]:
    largest = amax.new_full((), rules.largest)
    if rules.dtype == torch.int8:
        amax = amax.clamp(min=SGLANG_LEAST)
        values, scale = x * (largest / amax), amax / largest
        integers = values.trunc()
        away = ((values - integers).abs() >= 0.5) * values.sign()
        return (integers + away).to(torch.int8), scale
    scale = amax / largest
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    return (x * inverse).clamp(-rules.largest, rules.largest).to(rules.dtype), scale


def scaled_product(
    codes_TI: Tensor,
    scale_T1: Tensor,
    w_OI: Tensor,
    scale_O: Tensor,
    addend: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """[T, O] of ``dtype``, by the machine's products of 8 bits where it has them.

    The sum is exact in INT8 (int32 accumulator), so only the order of scaling is left to agree on.
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


def product_of_groups(
    codes_TI: Tensor,
    scale_TG: Tensor,
    w_OI: Tensor,
    scale_OG: Tensor,
    addend: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """[T, O] of ``dtype``: the groups' products of FP8 codes, scaled and summed in FP32, in order.

    Args:
        w_OI: the codes of the weight, or the same values in FP32.
        addend: as of ``scaled_product``.
    """
    y_TO = codes_TI.new_zeros(len(codes_TI), len(w_OI), dtype=torch.float32)
    groups = zip(codes_TI.split(BLOCK, dim=1), w_OI.split(BLOCK, dim=1), strict=True)
    for group, (codes_Ti, w_Oi) in enumerate(groups):
        part_TO = (codes_Ti.float() @ w_Oi.float().t()).mul_(scale_OG[:, group])
        y_TO.addcmul_(part_TO, scale_TG[:, group, None])
    return (y_TO if addend is None else y_TO.add_(addend)).to(dtype)


def int8_matmul(a_TI: Tensor, w_OI: Tensor) -> Tensor:
    """Exact int32 product of int8 codes, [T, O]."""
    if a_TI.device.type == "cpu" and not torch.cpu._is_vnni_supported():
        # 30 times as fast as torch's integer product, which has no fast kernel there.
        parts = zip(a_TI.split(EXACT_IN_FP32, dim=1), w_OI.split(EXACT_IN_FP32, dim=1), strict=True)
        y_TO = a_TI.new_zeros(len(a_TI), len(w_OI), dtype=torch.int32)
        for a_Ti, w_Oi in parts:
            y_TO += (a_Ti.float() @ w_Oi.float().t()).int()
        return y_TO
    rows = a_TI.shape[0]
    if a_TI.is_cuda and rows < CUDA_INT8_ROWS:
        a_TI = torch.nn.functional.pad(a_TI, (0, 0, 0, CUDA_INT8_ROWS - rows))
    return torch._int_mm(a_TI, w_OI.t())[:rows]


@functools.cache
def has_fp8_hardware(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
