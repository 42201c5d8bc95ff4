"""Log-probs of a split vocabulary against float64 log-softmax of the whole one."""

import pytest
import torch
import torch.distributed as dist

from qurl_megatron.algo import log_probs, token_log_probs
from tests.support.objectives import dense
from tests.support.ranks import run_on_ranks


def check_against_dense(device, logits_TV, targets_T, vocab_size, temperature, tolerance):
    """Values and gradients of this rank's shard; columns past ``vocab_size`` are padding."""
    rank, world = dist.get_rank(), dist.get_world_size()
    logits_TV, targets_T = logits_TV.to(device), targets_T.to(device)
    whole = logits_TV.double().requires_grad_()
    leaf = logits_TV.chunk(world, dim=1)[rank].clone().requires_grad_()
    log_prob, entropy = token_log_probs(
        leaf * 1, targets_T, group=dist.group.WORLD, temperature=temperature, vocab_size=vocab_size
    )
    expected_log_prob, expected_entropy = dense(whole[:, :vocab_size], targets_T, temperature)
    close = dict(atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_prob.double(), expected_log_prob, **close)
    torch.testing.assert_close(entropy.double(), expected_entropy, **close)

    g = torch.linspace(-1, 1, len(targets_T), device=device)
    h = torch.linspace(0.5, -2, len(targets_T), device=device)
    (g * log_prob + h * entropy).sum().backward()
    (g * expected_log_prob + h * expected_entropy).sum().backward()
    expected_grad = whole.grad.chunk(world, dim=1)[rank]
    torch.testing.assert_close(leaf.grad.double(), expected_grad, atol=tolerance, rtol=tolerance)
    padding = torch.arange(rank * leaf.shape[1], (rank + 1) * leaf.shape[1]) >= vocab_size
    assert (leaf.grad[:, padding] == 0).all()


@pytest.mark.parametrize("world_size", [2, 4])
def test_shards_equal_dense_in_values_and_gradients(backend, world_size, tmp_path):
    run_on_ranks(check_every_case, world_size, backend, tmp_path)


def check_every_case(device):
    torch.manual_seed(0)
    targets = torch.tensor([0, 3, 4, 7, 8, 12, 15])
    logits = torch.randn(7, 16) * 30
    check_against_dense(device, logits, targets, 16, 1.0, 1e-5)
    check_against_dense(device, logits, targets, 16, 0.7, 1e-5)
    check_against_dense(device, logits.bfloat16(), targets, 16, 1.3, 1e-2)
    # 13 of 16: the last of 4 ranks holds one real column; 9: it holds none at all.
    check_against_dense(device, logits, targets.clamp(max=12), 13, 0.7, 1e-5)
    check_against_dense(device, logits, targets.clamp(max=8), 9, 1.0, 1e-5)
    # Shards whose logits lie 2000 apart: a shard's own maximum says nothing about the sum.
    ramp = torch.arange(16.0).mul(500).expand(7, 16) + torch.randn(7, 16)
    check_against_dense(device, ramp, targets, 16, 1.0, 1e-5)
    check_against_dense(device, ramp.flip(1), targets, 16, 1.0, 1e-5)
    # One shard is masked out entirely.
    masked = torch.randn(2, 16)
    masked[:, :4] = -torch.inf
    shard = masked.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].to(device)
    log_prob, entropy = token_log_probs(
        shard, torch.tensor([4, 15], device=device), group=dist.group.WORLD
    )
    expected = dense(masked[:, 4:], torch.tensor([0, 11]))
    torch.testing.assert_close(log_prob.cpu().double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.cpu().double(), expected[1], atol=1e-5, rtol=1e-5)


def test_forward_has_two_collectives_and_backward_none(backend, tmp_path):
    run_on_ranks(check_collectives, 2, backend, tmp_path)


def check_collectives(device):
    calls = []
    all_reduce = dist.all_reduce
    log_probs.dist.all_reduce = lambda x, op, group: (
        calls.append((op, tuple(x.shape))),
        all_reduce(x, op=op, group=group),
    )
    leaf = torch.randn(5, 8, device=device, requires_grad=True)
    targets = torch.arange(5, device=device)
    log_prob, entropy = token_log_probs(leaf * 1, targets, group=dist.group.WORLD)
    (log_prob + entropy).sum().backward()
    assert calls == [(dist.ReduceOp.MAX, (5,)), (dist.ReduceOp.SUM, (3, 5))]
    empty, _ = token_log_probs(leaf[:0], targets[:0], group=dist.group.WORLD)
    assert empty.shape == (0,) and len(calls) == 2
