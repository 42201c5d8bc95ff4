"""Weights to INT8 and E4M3 codes, one scale per output channel, equal to torch's to the bit.

A short row stays in the registers of one program and is read once: its amax, its scale and its
codes come from the same copy. Longer rows, and rows on whose amax ranks have to agree, are read
twice.

Every step is exact or rounded as IEEE 754 says, on a GPU as in NumPy, with which the interpreter
computes: the amax is a maximum of integers (magnitudes of floats are ordered like their bits, and
nan is above inf, where a floating-point maximum would lose it); ``div_rn`` is a division, not a
product with a reciprocal; integers are rounded by an addition, E4M3 by integer arithmetic, which
GPUs without that format have too. No product is followed by a sum, which a compiler would fuse.

Shapes: O = output channels, I = input channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl_megatron.quant.rounding import Rounding

# Elements of the longest row that one program keeps in its registers. It could keep four times as
# many, but then an H100 has too few programs under way to wait for its memory in.
HELD = 1 << 13
STRIDE = 1 << 12  # elements at a time of rows that are read twice

_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
# Float32 numbers about it are the integers, so adding it rounds half to even.
_TO_INTEGER = tl.constexpr(1.5 * 2**23)
# Likewise 2**-9 apart, the steps of E4M3 below 2**-6.
_TO_STEPS = tl.constexpr(2.0**14)
_TO_STEPS_BITS = tl.constexpr((127 + 14) << 23)
# Of MurmurHash3's finalizer.
_FIRST, _SECOND = tl.constexpr(0x85EBCA6B), tl.constexpr(0xC2B2AE35)

COUNTER = list(Rounding._fields)
"""Arguments of the kernels; without a rounding, nothing is drawn and weights become the nearest
codes."""


def amax_rows(weight_OI: Tensor) -> Tensor:
    """Return the largest magnitude of each row, [O, 1] float32; nan where the row has one."""
    weight_OI = _by_rows(weight_OI)
    O, I = weight_OI.shape  # noqa: E741
    amax_O1 = torch.empty(O, 1, device=weight_OI.device)
    with torch.cuda.device_of(weight_OI):
        amax_row[O,](weight_OI, amax_O1, I, weight_OI.stride(0), BLOCK=STRIDE, num_warps=8)
    return amax_O1


def round_rows(
    weight_OI: Tensor,
    scale_O1: Tensor | None,
    dtype: torch.dtype,
    largest: float,
    rounding: Rounding | None = None,
) -> tuple[Tensor, Tensor]:
    """Return codes of a weight and its scales.

    Args:
        weight_OI: [O, I] in one of ``FORMATS``, not empty.
        scale_O1: [O, 1] float32; None: found in the same pass, for rows of at most ``HELD``.
        dtype: int8 or float8_e4m3fn.
        largest: the code of each row's largest magnitude.

    Returns:
        [O, I] codes, and [O, 1] float32 scales: inf or nan where the row has either, and then its
        codes mean nothing.
    """
    weight_OI = _by_rows(weight_OI)
    O, I = weight_OI.shape  # noqa: E741
    values_OI = torch.empty(O, I, dtype=dtype, device=weight_OI.device)
    finds_scale, block, number_of_warps = False, STRIDE, 8
    if scale_O1 is None:
        scale_O1 = torch.empty(O, 1, device=weight_OI.device)
        finds_scale, block = True, triton.next_power_of_2(I)
        number_of_warps = warps(block)
    with torch.cuda.device_of(weight_OI):
        round_row[O, triton.cdiv(I, block)](
            *(weight_OI, _storable(values_OI), scale_O1, I, weight_OI.stride(0), largest),
            *(rounding or (0, 0, 0, 0)),
            FINDS_SCALE=finds_scale,
            E4M3=dtype is torch.float8_e4m3fn,
            DRAWN=rounding is not None,
            BLOCK=block,
            num_warps=number_of_warps,
        )
    return values_OI, scale_O1


def warps(block: int) -> int:
    """Return the warps of a program that holds a row: no more than 64 elements to a thread."""
    return min(max(block // 1024, 4), 16)


def _by_rows(weight_OI: Tensor) -> Tensor:
    return weight_OI if weight_OI.stride(1) == 1 else weight_OI.contiguous()


def _storable(values: Tensor) -> Tensor:
    """Return E4M3 as plain bytes: older GPUs have no such format."""
    return values.view(torch.uint8) if values.dtype is torch.float8_e4m3fn else values


@triton.jit
def amax_row(weight, amax, columns, row_step, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    bits = tl.zeros([BLOCK], tl.int32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(weight + row * row_step + column, mask=column < columns, other=0.0)
        bits = tl.maximum(bits, _magnitude_bits(x.to(tl.float32)))
    tl.store(amax + row, tl.max(bits, axis=0).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=COUNTER)
def round_row(
    weight,
    values,
    scale,
    columns,
    row_step,
    largest,
    start,
    second,
    row_words,
    first_column,
    FINDS_SCALE: tl.constexpr,
    E4M3: tl.constexpr,
    DRAWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_range = column < columns
    x = tl.load(weight + row * row_step + column, mask=in_range, other=0.0).to(tl.float32)
    if FINDS_SCALE:  # the block holds the whole row
        row_scale = _scale(tl.max(_magnitude_bits(x), axis=0).to(tl.float32, bitcast=True), largest)
        tl.store(scale + row, row_scale)
    else:
        row_scale = tl.load(scale + row)
    x = tl.div_rn(x, row_scale)
    codes = _coded(x, largest, start + row * row_words, first_column + column, second, E4M3, DRAWN)
    tl.store(values + row * columns + column, codes, mask=in_range)


@triton.jit
def _coded(x, largest, start, column, second, E4M3: tl.constexpr, DRAWN: tl.constexpr):
    if DRAWN:
        drawn = _draw(start, column, second)
        return _e4m3_by_chance(x, drawn) if E4M3 else _codes(x + drawn, largest, E4M3)
    else:
        return _codes(x, largest, E4M3)


@triton.jit
def _magnitude_bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(amax, largest):
    scale = tl.div_rn(amax, largest)
    return tl.where(scale < _TINY, 1.0, scale)


@triton.jit
def _codes(x, largest, E4M3: tl.constexpr):
    if not E4M3:
        x = (x + _TO_INTEGER) - _TO_INTEGER
    x = tl.minimum(tl.maximum(x, -largest), largest)
    return _e4m3(x) if E4M3 else x.to(tl.int8)


@triton.jit
def _e4m3(x):
    """The bits of the nearest E4M3 number, half to even; |x| <= 448."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = _magnitude_bits(x)
    # 20 of the 23 bits of the mantissa go; half of the last one that stays is added, less one
    # where it is even. The exponent's bias falls from 127 to 7.
    odd = (size >> 20) & 1
    normal = (size - (120 << 23) + 0x7FFFF + odd) >> 20
    steps = size.to(tl.float32, bitcast=True) + _TO_STEPS
    small = steps.to(tl.int32, bitcast=True) - _TO_STEPS_BITS
    return (tl.where(size < (121 << 23), small, normal) | sign).to(tl.uint8)


@triton.jit
def _draw(start, column, second):
    """A number between -1/2 and 1/2 for an element of the whole tensor, as quant.rounding draws."""
    word = (start + (column >> 1)).to(tl.uint32)
    word ^= word >> 16
    word = word * _FIRST + second.to(tl.uint32)
    word ^= word >> 13
    word *= _SECOND
    word ^= word >> 16
    half = (word >> ((column & 1) * 16).to(tl.uint32)) & 0xFFFF
    # Put behind the point of a 1, and the middle taken off: a conversion's product would be fused.
    bits = (((half | 1) ^ 0x8000) << 7) | 0x3F800000
    return bits.to(tl.float32, bitcast=True) - 1.5


@triton.jit
def _e4m3_by_chance(x, drawn):
    """The bits of an E4M3 number beside x; |x| <= 448."""
    # E4M3's exponent, 1 where its numbers are subnormal; a step is 2**-3 times the power of two,
    # 2**-6 or more. A number of steps that reaches 16 carries into the exponent by itself.
    exponent = tl.maximum(_magnitude_bits(x) >> 23, 121) - 120
    step = ((exponent + 117) << 23).to(tl.float32, bitcast=True)
    steps = (tl.div_rn(x, step) + drawn + _TO_INTEGER) - _TO_INTEGER
    code = (exponent - 1) * 8 + tl.abs(steps).to(tl.int32)
    return (code | tl.where(steps < 0, 0x80, 0)).to(tl.uint8)
