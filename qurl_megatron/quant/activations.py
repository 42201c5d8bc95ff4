"""Activations on the fly: one scale per token, found from the token itself.

The one definition of it, for the embedded engine, for the trainer where it computes as the engines
do, and for tests of parity. The native decode step does the same to the last bit. SGLang's kernels
for GPUs have formulas of their own: they multiply by reciprocals, and round halves of INT8 away
from zero. Without a GPU, SGLang is given the embedded engine's kernels.

Shapes: T tokens, I features.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from qurl_megatron.quant.formats import round_to_grid_, scheme_named
from qurl_megatron.schemes import Scheme

Arithmetic = Literal["exact", "sglang"]
"""Whose: "exact" divides by the scale and rounds half to even; "sglang" follows its GPU kernels, as
of 0.5.23 (``_per_token_quant_int8``, ``per_token_quant_fp8``)."""

TINY = torch.finfo(torch.float32).tiny
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
    # By a tensor, as in ``formats.scale_of``.
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
