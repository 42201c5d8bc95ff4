"""Quantized shards are the shards of the quantized whole, bit for bit."""

import pytest
import torch
import torch.distributed as dist

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.quant import quantize
from tests.support.ranks import run_on_ranks
from tests.support.shards import check_nan, check_shards


@pytest.mark.parametrize("world_size", [2, 4])
def test_shards_equal_the_whole_bit_for_bit(backend, world_size, tmp_path):
    run_on_ranks(check_every_scheme, world_size, backend, tmp_path)


def check_every_scheme(device):
    torch.manual_seed(0)
    # Channels of very different size, one of them zero, one zero on the first rank alone.
    whole = torch.randn(512, 512) * torch.logspace(-6, 3, 512)[:, None]
    whole[5] = 0
    whole[6, :256] = 0
    for dtype in (torch.float32, torch.bfloat16):
        for scheme in ("int8", "fp8", "fp8_block"):
            for kind in ("nearest", "stochastic"):
                check_shards(whole.to(device, dtype), scheme, kind)
    check_nan(device)
    with pytest.raises(ConfigError, match="shards of 192 columns"):
        quantize(torch.ones(4, 192, device=device), "fp8_block", input_group=dist.group.WORLD)
