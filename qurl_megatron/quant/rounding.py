"""Scales, and rounding to the nearest code or by chance, for weights and activations alike.

Everything is symmetric: ``value = round(x / scale)`` with ``scale = amax / largest``, computed in
float32 element by element, so a slice of a tensor quantizes to the slice of the quantized tensor.
``fused_channels`` has the same arithmetic as kernels for GPUs.

By chance means up with the probability of the fraction, else down. Rounded to the nearest code, a
weight on the grid stays where it is until half a step of updates has come together. By chance, the
mean of ``code * scale`` is the weight itself, wherever it lies.

A draw belongs to an element of the whole tensor, not to a place in memory: it is a hash of the
element's index under a key made of the run's seed, the version and the tensor's name. So every
shard, in any order and however often it is made, gets the codes that the whole would get.

The hash is MurmurHash3's 32-bit finalizer (Appleby, github.com/aappleby/smhasher, ``fmix32``) on a
counter, with half of a 64-bit key added to the counter and half between its products. One word
serves two neighbours in a row, with 16 bits each.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.schemes import SCHEMES, Scheme

UNIT = 2.0**-16
"""Draws are odd multiples of it between -1/2 and 1/2.

Coarse enough for a sum with 127 to be exact: a number on the grid, or beside it by the rounding of
two divisions (as the largest of a row), gets its own code whatever is drawn.
"""

FIRST, SECOND = 0x85EBCA6B, 0xC2B2AE35
"""The factors of fmix32."""

_EXPONENT = 0x7F800000  # its bits in a float32
_FINEST = (127 - 6) << 23  # 2**-6, below which E4M3 keeps its step
_STEPS = 3 << 23  # an E4M3 number has 3 bits after the leading one: 8 steps between powers of two


def scheme_named(name: str) -> Scheme:
    """Return a scheme; raise ``ConfigError`` if there is none of that name."""
    if name not in SCHEMES or not SCHEMES[name].stored:
        names = sorted(name for name, row in SCHEMES.items() if row.stored)
        raise ConfigError(f"unknown quantization scheme {name!r}; known are {names}")
    return SCHEMES[name]


def scale_of(amax: Tensor, scheme: Scheme) -> Tensor:
    """Return float32 scales; 1 if all elements are 0, or so small that the scale is subnormal."""
    # Divide by a tensor: for a number, a GPU multiplies by its reciprocal, and more than half of
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


class Rounding(NamedTuple):
    """The source of the draws that round one shard of a weight, all as int32."""

    start: int  # where the shard's first row counts from, one half of the key added
    second: int  # the other half of the key
    row_words: int  # that a row of the whole tensor takes from the counter
    first_column: int  # of the shard in the whole tensor


def rounding_of(
    kind: str,
    *,
    seed: int,
    version: int,
    name: str,
    shape: Sequence[int],
    split_dim: int | None,
    offset: int,
) -> Rounding | None:
    """Return the rounding of one shard of a tensor; None for the nearest code.

    Args:
        kind: "nearest"; "stochastic", with draws of its own for each version; or "dithered", with
            one draw for each weight, in all versions of the run.
        name: the tensor's name in a Hugging Face checkpoint.
        shape: of the whole tensor, [O, I].
        split_dim: along which it is split, with the shard beginning at ``offset``; None: not split.
    """
    if kind == "nearest":
        return None
    row, column = (offset if split_dim == dim else 0 for dim in (0, 1))
    text = f"{seed} {version if kind == 'stochastic' else None} {name}"
    first, second = struct.unpack("<ii", hashlib.blake2b(text.encode(), digest_size=8).digest())
    words = (shape[1] + 1) // 2
    return Rounding(_int32(first + row * words), second, words, column)


class Draws:
    """The draws of one shard, some rows at a time, in buffers that the next rows overwrite."""

    def __init__(
        self, rounding: Rounding, scheme: Scheme, rows: int, columns: int, device: torch.device
    ) -> None:
        """
        Args:
            rows: the most that are rounded at once.
            columns: of the shard.
        """
        self._scheme = scheme
        self._start, second, self._step, column = rounding
        first, self._skip = divmod(column, 2)
        words = (self._skip + columns + 1) // 2
        self._rows = torch.arange(rows, device=device)[:, None] * self._step
        self._across = torch.arange(first, first + words, dtype=torch.int32, device=device)
        self._second = torch.tensor(second, dtype=torch.int32, device=device)
        # When a row's words have become draws, their place is free for the steps of its numbers.
        place = torch.empty(2 * rows * words, dtype=torch.int32, device=device)
        self._words, self._spare = place.view(2, rows, words).unbind()
        self._steps = place[: rows * columns].view(rows, columns)
        self._drawn = torch.empty(rows, columns, device=device)

    def round_(self, x: Tensor, first: int) -> Tensor:
        """Round rows ``x / scale`` of the shard, float32, from row ``first`` on, in place."""
        drawn = self._draw(first, len(x))
        if not self._scheme.dtype.is_floating_point:
            return x.add_(drawn, alpha=UNIT).round_()
        steps = torch.bitwise_and(x.view(torch.int32), _EXPONENT, out=self._steps[: len(x)])
        steps = steps.clamp_(min=_FINEST).sub_(_STEPS).view(torch.float32)
        # Adding 0 takes the sign off a zero, which a weight of 0 would get by chance.
        return x.div_(steps).add_(drawn, alpha=UNIT).round_().mul_(steps).add_(0.0)

    def _draw(self, first: int, rows: int) -> Tensor:
        """Return odd numbers between -2**15 and 2**15, [rows, columns] float32."""
        words, spare = self._words[:rows], self._spare[:rows]
        counter = (self._rows[:rows] + (self._start + first * self._step)).to(torch.int32)
        torch.add(counter, self._across, out=words)
        _fold_(words, 16, spare)
        torch.add(self._second, words, alpha=_int32(FIRST), out=words)
        _fold_(words, 13, spare)
        words.mul_(_int32(SECOND))
        _fold_(words, 16, spare)
        halves = words.view(torch.int16)[:, self._skip :][:, : self._drawn.shape[1]]
        return self._drawn[:rows].copy_(halves.bitwise_or_(1))


def _int32(number: int) -> int:
    """Return the lower 32 bits as a signed number: torch's operations take no unsigned ones."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _fold_(words: Tensor, bits: int, spare: Tensor) -> None:
    """Compute ``words ^= words >> bits``, without the sign that int32 shifts in."""
    torch.bitwise_right_shift(words, bits, out=spare)
    words.bitwise_xor_(spare.bitwise_and_((1 << (32 - bits)) - 1))
