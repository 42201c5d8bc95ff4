"""The test helper itself: a failing or hanging rank fails the test, with the reason."""

import time

import pytest
import torch
import torch.distributed as dist

from qurl_megatron.testing.ranks import RankError, run_on_ranks


def test_every_rank_runs_with_its_own_copy_of_the_arguments(tmp_path):
    run_on_ranks(check_world, 2, "gloo", tmp_path, torch.zeros(1), "text")
    run_on_ranks(check_world, 2, "gloo", tmp_path, torch.zeros(1), "text")  # same folder again


def check_world(device, zeros, text):
    assert device.type == "cpu" and text == "text" and torch.get_num_threads() == 1
    zeros += dist.get_rank() + 1
    dist.barrier()
    assert zeros.item() == dist.get_rank() + 1


def test_a_failing_rank_fails_the_test_while_the_others_wait(tmp_path):
    with pytest.raises(RankError, match="rank 1 of 2(?s:.*)rank one is unhappy"):
        run_on_ranks(fail_on_rank_one, 2, "gloo", tmp_path)


def fail_on_rank_one(device):
    if dist.get_rank() == 1:
        raise RuntimeError("rank one is unhappy")
    dist.barrier()


def test_a_hanging_rank_is_killed(tmp_path):
    with pytest.raises(
        TimeoutError, match=r"ranks \[1\] of 2 ran over 3 s(?s:.*)in hang_on_rank_one"
    ):
        run_on_ranks(hang_on_rank_one, 2, "gloo", tmp_path, timeout_s=3)


def hang_on_rank_one(device):
    if dist.get_rank() == 1:
        time.sleep(600)
