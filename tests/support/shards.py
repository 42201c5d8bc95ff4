"""Parts of tensors as a training rank holds them, and as they are quantized."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.quant import quantize, rounding_of
from qurl_megatron.tensors.slice import Shard


def shard(name: str, value: Tensor, dim: int | None = None, start: int = 0) -> Shard:
    """The last part of a tensor, or all of it."""
    shape = tuple(start + n if axis == dim else n for axis, n in enumerate(value.shape))
    return Shard(name, value, shape, dim, start)


def check_shards(whole, scheme, kind):
    """Check that quantized shards are the shards of the quantized whole, bit for bit."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def rounding(dim=None):
        offset = 0 if dim is None else rank * whole.shape[dim] // world
        place = {"shape": whole.shape, "split_dim": dim, "offset": offset}
        return rounding_of(kind, seed=0, version=1, name="x", **place)

    expected = quantize(whole, scheme, rounding=rounding())
    rows, columns = (whole.chunk(world, dim=dim)[rank] for dim in (0, 1))

    by_output = quantize(rows, scheme, rounding=rounding(0))
    assert same(by_output.values, expected.values.chunk(world, dim=0)[rank])
    assert same(by_output.scale, expected.scale.chunk(world, dim=0)[rank])

    group = dist.group.WORLD
    by_input = quantize(columns, scheme, input_group=group, rounding=rounding(1))
    assert same(by_input.values, expected.values.chunk(world, dim=1)[rank])
    # A channel's scale is shared by all ranks, a block's belongs to one.
    scale = expected.scale if expected.block is None else expected.scale.chunk(world, dim=1)[rank]
    assert same(by_input.scale, scale)


def check_nan(device):
    """A nan on one rank stops every rank, so that none waits for the others for ever."""
    shard = torch.ones(4, 128, device=device)
    if dist.get_rank() == 1:
        shard[0, 0] = torch.nan
    with pytest.raises(ConfigError, match="inf or nan"):
        quantize(shard, "int8", input_group=dist.group.WORLD)


def same(a, b):
    """In type and bytes."""
    a, b = a.contiguous(), b.contiguous()
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
