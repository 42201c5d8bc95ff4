"""Activations on the fly: one scale per token, found from the token itself.

The arithmetic of the engines' W8A8 kernels, for the embedded engine and for parity tests.
"""

import torch.nn.functional as F
from torch import Tensor

from qurl_megatron.quant.formats import round_to_grid_, scale_of, scheme_named


def quantize_tokens(x: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """``(values, scale)`` with ``values * scale`` nearest to each token.

    Args:
        x: [..., features] in any float format; not modified.
        scheme: "int8", "fp8" or a simulated one for one scale per token, [..., 1]; "fp8_block" for
            one per token and group of 128 features, [..., ceil(features / 128)].

    Not checked for inf and nan, which would cost a synchronisation per layer: they make the scale
    inf or nan, and so everything computed with it.
    """
    rules = scheme_named(scheme)
    x = x.detach().float()
    if rules.block is None:
        scale = scale_of(x.abs().amax(dim=-1, keepdim=True), rules)
        return round_to_grid_(x / scale, rules).to(rules.dtype), scale
    features = x.shape[-1]
    groups = F.pad(x, (0, -features % rules.block)).unflatten(-1, (-1, rules.block))
    scale = scale_of(groups.abs().amax(dim=-1, keepdim=True), rules)
    values = round_to_grid_(groups / scale, rules).to(rules.dtype)
    return values.flatten(-2)[..., :features], scale.squeeze(-1)
