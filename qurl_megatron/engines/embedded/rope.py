"""Rotary frequencies, by transformers' formulas."""

import math

import torch
from torch import Tensor

from qurl_megatron.tensors.arch import Arch, Llama3Rope


def inverse_frequencies(arch: Arch) -> Tensor:
    """Radians per position of each pair of channels, [head_dim / 2] float32."""
    exponent = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).float() / arch.head_dim
    inverse = 1.0 / (arch.rope_theta**exponent)
    return _llama3(inverse, arch.rope_scaling) if arch.rope_scaling else inverse


def _llama3(inverse: Tensor, rope: Llama3Rope) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, middle ones blend, short ones stay."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    old_context = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    stretched = torch.where(wavelength > old_context / low, inverse / rope.factor, inverse)
    smooth = (old_context / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    middle = (wavelength >= old_context / high) & (wavelength <= old_context / low)
    return torch.where(middle, blended, stretched)
