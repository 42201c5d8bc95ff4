"""Scales and rounding of ``schemes``, for weights and activations alike.

Everything is symmetric: ``value = round(x / scale)`` with ``scale = amax / largest``, computed in
float32 element by element, so a slice of a tensor quantizes to the slice of the quantized tensor.
``fused_channels`` has the same arithmetic as kernels for GPUs.
"""

import torch
from torch import Tensor

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.schemes import SCHEMES, Scheme


def scheme_named(name: str) -> Scheme:
    """
    Raises:
        ConfigError: there is no such scheme.
    """
    stored_schemes = [name for name, row in SCHEMES.items() if row.stored]
    if name not in stored_schemes:
        raise ConfigError(
            f"unknown quantization scheme {name!r}; known are {sorted(stored_schemes)}"
        )
    return SCHEMES[name]


def scale_of(amax: Tensor, scheme: Scheme) -> Tensor:
    """float32 scales; 1 where all elements are 0, or so small that the scale is subnormal."""
    # By a tensor: a number would be multiplied by as its reciprocal on a GPU, and more than half of
    # all E4M3 scales would differ from the CPU's in the last bit.
    scale = amax / amax.new_full((), scheme.largest)
    return torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)


def round_to_grid_(x: Tensor, scheme: Scheme) -> Tensor:
    """Prepare float32 ``x / scale`` for its cast, in place: half to even.

    Nothing is clamped, which would be a pass over memory: where the scale comes from x's own amax,
    the largest quotient exceeds ``largest`` by no more than the rounding of two divisions, and
    rounds to ``largest``. So does the float8 cast, which rounds half to even itself.
    """
    return x if scheme.dtype.is_floating_point else x.round_()
