"""The test helper itself: a failing or hanging rank fails the test, with the reason."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from qurl_megatron.actor import megatron
from tests.support.ranks import GROUPS, RankError, run_on_ranks


def test_every_rank_runs_with_its_own_copy_of_the_arguments(backend, tmp_path):
    run_on_ranks(check_world, 2, backend, tmp_path, torch.zeros(1), "text", backend)
    run_on_ranks(check_world, 2, backend, tmp_path, torch.zeros(1), "text", backend)  # same folder


def check_world(device, zeros, text, backend):
    assert text == "text" and torch.get_num_threads() == 1
    place = {name: int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    assert place == dict(RANK=dist.get_rank(), LOCAL_RANK=dist.get_rank(), WORLD_SIZE=2)
    zeros += dist.get_rank() + 1
    dist.barrier()
    assert zeros.item() == dist.get_rank() + 1
    if backend == "gloo":
        # Nothing lands on a GPU by chance, not even by way of those who ask for "the device".
        assert device.type == "cpu" and not torch.cuda.is_available()
    else:
        assert device.index == torch.cuda.current_device() == dist.get_rank()
        assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"  # what is compared exactly is exact


def test_a_failing_rank_fails_the_test_while_the_others_wait(backend, tmp_path):
    with pytest.raises(RankError, match="rank 1 of 2(?s:.*)rank one is unhappy"):
        run_on_ranks(fail_on_rank_one, 2, backend, tmp_path)


def fail_on_rank_one(device):
    if dist.get_rank() == 1:
        raise RuntimeError("rank one is unhappy")
    dist.barrier()


def test_a_hanging_rank_is_killed(backend, tmp_path):
    with pytest.raises(
        TimeoutError, match=r"ranks \[1\] of 2 ran over 6 s(?s:.*)in hang_on_rank_one"
    ):
        run_on_ranks(hang_on_rank_one, 2, backend, tmp_path, timeout_s=6)


def hang_on_rank_one(device):
    if dist.get_rank() == 1:
        time.sleep(600)


def test_ranks_meet_as_those_of_a_run_do():
    assert megatron._backend(torch.device("cuda", 0)) == GROUPS["nccl"]
    assert megatron._backend(torch.device("cpu")) == GROUPS["gloo"]
