"""Whitening over ranks against whitening everything at once."""

import pytest
import torch
import torch.distributed as dist

from qurl_megatron.algo import advantages
from qurl_megatron.algo.advantages import whitened
from tests.support.ranks import run_on_ranks


def check_against_whole(device):
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    for sizes in ([7, 30], [0, 12], [1, 0], [0, 0]):
        whole = 5 + 3 * torch.randn(sum(sizes), generator=generator)
        mine = whole.split(sizes)[rank].to(device)
        expected = whitened(whole).split(sizes)[rank]
        torch.testing.assert_close(whitened(mine, group=dist.group.WORLD).cpu(), expected)

    calls = []
    all_reduce = dist.all_reduce
    advantages.dist.all_reduce = lambda x, group: (
        calls.append(x.dtype),
        all_reduce(x, group=group),
    )
    alone = whitened(torch.tensor([1.0, 2.0, 3.0], device=device))
    assert not calls and alone.tolist() == pytest.approx([-1, 0, 1])
    whitened(torch.ones(rank, device=device), group=dist.group.WORLD)
    assert calls == [torch.float64]


def test_tokens_on_two_ranks_are_whitened_as_one_batch(backend, tmp_path):
    run_on_ranks(check_against_whole, 2, backend, tmp_path)
