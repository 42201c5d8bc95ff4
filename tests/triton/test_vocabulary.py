"""Log-probs, entropies and gradients of the kernels, beside float64 and torch's own operations."""

import math

import pytest
import torch

from qurl_megatron.algo import token_log_probs
from qurl_megatron.kit.fused import SWITCH

FORMATS = [torch.float32, torch.bfloat16, torch.float16]
TOKENS = 6


@pytest.fixture(params=[16, 4096])
def block(request, device, monkeypatch) -> int:
    from qurl_megatron.algo import fused_vocabulary as vocabulary

    monkeypatch.setattr(vocabulary, "BLOCK", request.param)
    return request.param


def batch(device, dtype=torch.float32, width=101, spread=5.0):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(TOKENS, width, generator=generator) * spread).to(dtype)
    targets = torch.tensor([0, 15, 16, 17, width - 1, width // 2])
    return logits.to(device), targets.to(device)


def computed(logits, targets, temperature=1.0, **options):
    """Log-probs, entropies, and the gradient of a sum of both."""
    leaf = logits.clone().requires_grad_()
    log_prob, entropy = token_log_probs(leaf * 1, targets, temperature=temperature, **options)
    g, h = upstream(logits)
    (g * log_prob + h * entropy).sum().backward()
    return log_prob.detach(), entropy.detach(), leaf.grad


def by_torch(*args, **options):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(SWITCH, "0")
        return computed(*args, **options)


def in_float64(logits, targets, temperature=1.0):
    leaf = logits.double().requires_grad_()
    log_p = (leaf / temperature).log_softmax(-1)
    log_prob = log_p.gather(-1, targets[:, None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    g, h = upstream(logits)
    (g * log_prob + h * entropy).sum().backward()
    return log_prob.detach(), entropy.detach(), leaf.grad


def upstream(logits):
    return (torch.linspace(*ends, TOKENS, device=logits.device) for ends in ((-2, 1), (1, -3)))


def errors(found, true):
    return [(f.double() - t).abs().max().item() for f, t in zip(found, true, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.3])
@pytest.mark.parametrize("dtype", FORMATS)
def test_errors_against_float64_are_rounding_errors(block, device, dtype, temperature):
    logits, targets = batch(device, dtype)
    true = in_float64(logits, targets, temperature)
    found = errors(computed(logits, targets, temperature), true)
    torchs = errors(by_torch(logits, targets, temperature), true)
    # Two steps of float32 at the largest log-prob, and the gradient's own format.
    step = 2 * torch.finfo(torch.float32).eps * (1 + true[0].abs().max().item())
    step_of_gradient = torch.finfo(dtype).eps * true[2].abs().max().item()
    assert found[0] <= max(step, torchs[0]) and found[1] <= max(step, torchs[1])
    assert found[2] <= max(step_of_gradient, torchs[2], step)


def test_errors_do_not_grow_with_the_vocabulary(device):
    logits, targets = batch(device, width=152_064, spread=2.0)
    true = in_float64(logits, targets)
    found, torchs = (errors(way(logits, targets), true) for way in (computed, by_torch))
    step = 2 * torch.finfo(torch.float32).eps * true[0].abs().max().item()
    assert found[0] <= step and found[1] <= step and found[2] <= max(torchs[2], 1e-7)


def test_results_repeat_to_the_bit(block, device):
    logits, targets = batch(device, torch.bfloat16)
    once, again = computed(logits, targets), computed(logits, targets)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("step", [300, -300])
def test_logits_far_apart_from_block_to_block(block, device, step):
    logits, targets = batch(device)
    logits += torch.arange(101.0, device=device) * step
    true = in_float64(logits, targets)
    for found, expected in zip(computed(logits, targets), true, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def test_blocks_that_are_masked_out_take_no_part(block, device):
    logits, targets = batch(device)
    logits[:, 20:70] = -torch.inf
    logits[1:, :15] = -torch.inf  # more than what a row begins with
    targets[:] = torch.tensor([3, 15, 16, 17, 100, 80])
    found = computed(logits, targets)
    for row, (log_prob, entropy) in enumerate(zip(*found[:2], strict=True)):
        kept = logits[row].isfinite()
        log_p = logits[row, kept].double().log_softmax(-1)
        place = int(kept[: targets[row]].sum())
        assert math.isclose(log_prob, log_p[place], abs_tol=1e-5)
        assert math.isclose(entropy, -(log_p.exp() * log_p).sum(), abs_tol=1e-5)
    assert found[2].isfinite().all() and (found[2][~logits.isfinite()].abs() < 1e-20).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 40, 100])
def test_a_logit_that_is_nan_or_inf_stays_visible(block, device, bad, column):
    logits, targets = batch(device)
    logits[2, column] = bad
    log_prob, entropy, gradient = computed(logits, targets)
    assert log_prob.isnan().tolist() == entropy.isnan().tolist() == [i == 2 for i in range(TOKENS)]
    assert gradient.isnan().any(dim=1).tolist() == [i == 2 for i in range(TOKENS)]


def test_padding_of_any_width_gets_no_gradient(block, device):
    logits, targets = batch(device)
    for padding in (1, 11, 40):
        padded = torch.cat([logits, torch.full((TOKENS, padding), 1e4, device=device)], dim=1)
        *values, gradient = computed(padded, targets, vocab_size=101)
        *expected, expected_gradient = computed(logits, targets)
        # Rows that begin elsewhere are loaded otherwise on a GPU, and summed up in another order.
        torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient[:, :101], expected_gradient, rtol=1e-5, atol=1e-6)
        assert not gradient[:, 101:].any()


def test_the_kernels_are_what_runs_unless_they_are_switched_off(device, monkeypatch):
    from qurl_megatron.algo import fused_vocabulary as vocabulary

    calls = []
    for name in ("shard_sums", "write_gradient"):
        kernel = getattr(vocabulary, name)

        def counted(*args, name=name, kernel=kernel, **options):
            calls.append(name)
            return kernel(*args, **options)

        monkeypatch.setattr(vocabulary, name, counted)
    computed(*batch(device))
    assert calls == ["shard_sums", "write_gradient"]
    by_torch(*batch(device))
    assert len(calls) == 2
