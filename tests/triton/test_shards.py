"""Ranks that share rows agree on one scale, by the kernels as by torch."""

import pytest
import torch

from tests.support.ranks import run_on_ranks
from tests.support.shards import check_nan, check_shards


def check_both_formats(device):
    whole = torch.randn(12, 64, generator=torch.Generator().manual_seed(0))
    whole *= torch.logspace(-6, 3, 12)[:, None]
    whole[5] = 0
    whole[6, :32] = 0  # on the first rank alone
    for dtype in (torch.float32, torch.bfloat16):
        for scheme in ("int8", "fp8"):
            for kind in ("nearest", "stochastic"):
                check_shards(whole.to(device, dtype), scheme, kind)
    check_nan(device)


def test_shards_equal_the_whole_bit_for_bit(device, tmp_path):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    run_on_ranks(check_both_formats, 2, {"cpu": "gloo", "cuda": "nccl"}[device], tmp_path)
