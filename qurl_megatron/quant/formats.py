"""The number formats of the rollout model, and the arithmetic that weights and activations share.

Everything is symmetric: ``value = round(x / scale)`` with ``scale = amax / largest``, computed in
float32 element by element, so a slice of a tensor quantizes to the slice of the quantized tensor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qurl_megatron.errors import ConfigError

BLOCK = 128  # edge of the squares of "fp8_block"


@dataclass(frozen=True)
class Scheme:
    """One number format and how far one scale reaches."""

    dtype: torch.dtype
    largest: float  # the value that amax is mapped to
    block: int | None = None  # edge of the squares that share a weight scale; None: a scale per row


SCHEMES: dict[str, Scheme] = {
    "int8": Scheme(torch.int8, 127.0),
    "fp8": Scheme(torch.float8_e4m3fn, 448.0),
    "fp8_block": Scheme(torch.float8_e4m3fn, 448.0, block=BLOCK),
}

# Fewer bits in INT8's clothes: the same storage and products, a coarser grid. No hardware computes
# them this way and no checkpoint is exported in them; the embedded engine does, so that a small
# model meets the quantization noise that a large one meets at 8 bits.
SIMULATED: dict[str, Scheme] = {
    "int4": Scheme(torch.int8, 7.0),
    "int5": Scheme(torch.int8, 15.0),
    "int6": Scheme(torch.int8, 31.0),
}


def scheme_named(name: str) -> Scheme:
    """
    Raises:
        ConfigError: there is no such scheme.
    """
    known = SCHEMES | SIMULATED
    if name not in known:
        raise ConfigError(f"unknown quantization scheme {name!r}; known are {sorted(known)}")
    return known[name]


def scale_of(amax: Tensor, scheme: Scheme) -> Tensor:
    """float32 scales; 1 where all elements are 0, or so small that the scale is subnormal."""
    # By a tensor: a number would be multiplied by as its reciprocal on a GPU, and more than half of
    # all E4M3 scales would differ from the CPU's in the last bit.
    scale = amax / amax.new_full((), scheme.largest)
    return torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)


def round_to_grid_(x: Tensor, scheme: Scheme) -> Tensor:
    """Prepare float32 ``x / scale`` for its cast, in place: half to even.

    Nothing is clamped, which would be a pass over memory: where the scale is that of x's own amax,
    the largest quotient exceeds ``largest`` by no more than the rounding of two divisions, and
    rounds to ``largest``. So does the float8 cast, which rounds half to even itself.
    """
    return x if scheme.dtype.is_floating_point else x.round_()
