"""Rounding by chance: frequencies by hand, no bias, and the codes of the whole from every shard.

A sum of n draws is held to 5 of its standard deviations, which chance alone exceeds once in 1.7
million sums. Seeds are fixed: what passes once passes always.
"""

import hashlib
import math
from itertools import pairwise

import pytest
import torch

from qurl_megatron.quant import QuantizedWeight, dequantize, quantize, rounding_of
from qurl_megatron.quant.rounding import scheme_named

SCHEMES = ["int8", "int6", "int5", "int4", "fp8", "fp8_block"]
NAME = "model.layers.0.mlp.down_proj.weight"


def rounding(shape, *, kind="stochastic", seed=3, version=7, name=NAME, dim=None, offset=0):
    place = {"shape": shape, "split_dim": dim, "offset": offset}
    return rounding_of(kind, seed=seed, version=version, name=name, **place)


def rounded(weight, scheme, **drawn) -> QuantizedWeight:
    return quantize(weight, scheme, rounding=rounding(weight.shape, **drawn))


def weight(rows=300, columns=256):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.02


def codes(quantized):
    return quantized.values.view(torch.uint8)


def grid_of(scheme):
    """The numbers that codes from 0 up stand for."""
    rules = scheme_named(scheme)
    if rules.dtype is torch.int8:
        return torch.arange(rules.largest + 1)
    return torch.arange(0x7F, dtype=torch.uint8).view(rules.dtype).float()


@pytest.mark.parametrize(
    "scheme, value, below, above, probability",
    [
        ("int8", 3.25, 3, 4, 0.25),
        ("int8", -3.25, -4, -3, 0.75),
        ("int8", 126.75, 126, 127, 0.75),
        ("int4", 0.25, 0, 1, 0.25),
        ("fp8", 16.5, 16, 18, 0.25),  # steps of 2 between 16 and 32
        ("fp8", 31.5, 30, 32, 0.75),  # of 4 from there
        ("fp8", -264.0, -288, -256, 0.75),  # of 32 from 256
        ("fp8", 424.0, 416, 448, 0.25),  # the last
        ("fp8", 2.25 * 2**-9, 2 * 2**-9, 3 * 2**-9, 0.25),  # subnormal: all steps are 2**-9
        ("fp8", 7.75 * 2**-9, 7 * 2**-9, 2**-6, 0.75),  # the last of these
        ("fp8", 0.25 * 2**-9, 0, 2**-9, 0.25),
        ("fp8", 1.0625, 1, 1.125, 0.5),
    ],
)
def test_a_value_goes_up_as_often_as_its_fraction_says(scheme, value, below, above, probability):
    count = 1 << 16
    w = torch.full((64, count // 64 + 1), value)
    w[:, -1] = scheme_named(scheme).largest  # makes the scale 1
    found = rounded(w, scheme)
    assert (found.scale == 1).all()
    values = found.values[:, :-1].float()
    assert ((values == below) | (values == above)).all()
    share = (values == above).double().mean().item()
    assert abs(share - probability) < 5 * math.sqrt(probability * (1 - probability) / count)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_mean_over_versions_is_the_weight_where_the_nearest_code_is_not(scheme):
    w, versions = weight(128, 128), 64
    found = [dequantize(rounded(w, scheme, version=v)).double() for v in range(versions)]
    mean = torch.stack(found).mean(0)
    # With the fraction f, a draw's variance is f (1 - f) <= 1/4 steps squared.
    step = grid_of(scheme).diff().max() * rounded(w, scheme).scale
    bias = (mean - w.double()) / step
    assert bias.abs().max() < 6 * 0.5 / math.sqrt(versions)  # of each of 16384 elements
    assert abs(bias.mean()) < 5 * 0.5 / math.sqrt(versions * w.numel())  # of them all
    nearest = (dequantize(quantize(w, scheme)) - w).double().square().sum()
    assert (mean - w.double()).square().sum() < nearest / 8  # 1/6 / 64 for each 1/12


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_on_the_grid_keeps_its_code_whatever_is_drawn(scheme):
    grid = grid_of(scheme)
    w = torch.cat([grid, -grid])[None].repeat(512, 1)
    for size in (1.0, 2.0**-20):
        assert torch.equal(dequantize(rounded(w * size, scheme)), w * size)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_largest_of_a_scale_gets_the_largest_code_and_nothing_leaves_the_range(scheme):
    generator = torch.Generator().manual_seed(0)
    w = torch.rand(512, 128, generator=generator) - 0.5
    w *= 2.0 ** torch.randint(-110, 120, (512, 1), generator=generator)
    largest = scheme_named(scheme).largest
    drawn = (rounded(w, scheme, version=version) for version in range(8))
    for found in (quantize(w, scheme), *drawn):
        values, rows = found.values.float(), w
        if found.block:
            values, rows = values.view(4, -1), w.view(4, -1)
        place = rows.abs().argmax(dim=1, keepdim=True)
        assert torch.equal(values.gather(1, place), largest * rows.gather(1, place).sign())
        assert values.abs().max() == largest


def draw(seed, version, name, shape, row, column) -> float:
    """One draw in plain integers: MurmurHash3's finalizer, a key and a counter."""
    key = hashlib.blake2b(f"{seed} {version} {name}".encode(), digest_size=8).digest()
    low, high = (int.from_bytes(half, "little") for half in (key[:4], key[4:]))
    words = -(-shape[1] // 2)
    word = (low + row * words + column // 2) % 2**32
    word ^= word >> 16
    word = (word * 0x85EBCA6B + high) % 2**32
    word ^= word >> 13
    word = word * 0xC2B2AE35 % 2**32
    word ^= word >> 16
    half = word >> 16 if column % 2 else word & 0xFFFF
    return ((half | 1) - (1 << 16 if half >> 15 else 0)) / 2**16


@pytest.mark.parametrize("columns", [6, 7])
def test_draws_are_those_of_the_hash_in_plain_integers(columns):
    w = torch.full((300, columns), 40.5)
    w[:, 0] = 127
    found = rounded(w, "int8", seed=1, version=2, name="x").values
    for row in (0, 1, 298, 299):
        for column in range(1, columns):
            up = draw(1, 2, "x", w.shape, row, column) > 0
            assert found[row, column] == 40 + up, (row, column)


def test_neighbours_rows_and_versions_are_drawn_independently():
    w = torch.full((512, 513), 0.5)
    w[:, -1] = 127
    this, other = (rounded(w, "int8", version=v).values[:, :-1].double() - 0.5 for v in (0, 1))
    for a, b in [
        (this[:, ::2], this[:, 1::2]),  # one word
        (this[:, 1:-1:2], this[:, 2::2]),
        (this[1:], this[:-1]),
        (this, other),
        (this[:, : this.shape[1] // 2], this[:, this.shape[1] // 2 :]),
    ]:
        assert abs((4 * a * b).mean()) < 5 / math.sqrt(a.numel())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("columns", [256, 251])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_any_size_in_any_order_are_those_of_the_whole(scheme, columns, dim):
    w = weight(columns=columns)
    inner = [128, 256][: 2 - dim] if scheme == "fp8_block" else [1, 37, 100, 163]
    bounds = [0, *inner, w.shape[dim]]
    if dim == 1 and scheme != "fp8_block":
        w[:, bounds[:-1]] = 1.0  # each has the row's largest, as ranks would agree
    whole = codes(rounded(w, scheme))
    for begin, end in reversed(list(pairwise(bounds))):
        part, expected = (x.narrow(dim, begin, end - begin) for x in (w, whole))
        shard = quantize(part, scheme, rounding=rounding(w.shape, dim=dim, offset=begin))
        assert torch.equal(codes(shard), expected), (begin, end)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_same_is_drawn_again_and_something_else_for_another_version_tensor_or_run(scheme):
    w = weight()
    first = codes(rounded(w, scheme))
    assert torch.equal(first, codes(rounded(w, scheme)))
    for other in ({"version": 8}, {"name": NAME + "x"}, {"seed": 4}):
        # Two draws give two codes with 2 f (1 - f), one time in three.
        changed = (codes(rounded(w, scheme, **other)) != first).double().mean()
        assert 0.3 < changed < 0.36, other
    dithered = {seed: codes(rounded(w, scheme, kind="dithered", seed=seed)) for seed in (3, 4)}
    assert torch.equal(codes(rounded(w, scheme, kind="dithered", version=8)), dithered[3])
    assert 0.3 < (dithered[4] != dithered[3]).double().mean() < 0.36


def test_dithered_a_tenth_of_a_step_moves_a_tenth_of_the_codes_and_none_backwards():
    """Where the nearest codes, of weights that were on the grid, do not move at all."""
    w = torch.randint(-100, 100, (256, 257), generator=torch.Generator().manual_seed(0)).float()
    w[:, -1] = 127
    moved = w + 0.1
    moved[:, -1] = 127
    assert torch.equal(quantize(w, "int8").values, quantize(moved, "int8").values)
    before, after = (rounded(x, "int8", kind="dithered").values[:, :-1].int() for x in (w, moved))
    change = (after - before).double()
    assert change.min() == 0 and change.max() == 1
    assert abs(change.mean() - 0.1) < 5 * math.sqrt(0.1 * 0.9 / change.numel())
