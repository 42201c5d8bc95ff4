"""Log-probs of a whole vocabulary: values, gradients, and what happens to the logits' memory."""

import pytest
import torch

from qurl_megatron.algo import log_probs, token_log_probs
from tests.support.objectives import dense


@pytest.fixture(params=[1, 3, 1000])
def tokens_per_chunk(request, monkeypatch):
    monkeypatch.setitem(log_probs.SCRATCH_BYTES, "cpu", request.param * 11 * 4)


def batch(dtype=torch.float32, tokens=7, vocab=11):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(tokens, vocab, generator=generator) * 5).to(dtype)
    return logits, torch.arange(tokens) % vocab


def gradients(logits, targets, g, h, temperature):
    """(ours, dense float64) gradient of sum(g * log_prob + h * entropy); None leaves a term out."""
    results = []
    for x, compute in (
        (logits.clone(), lambda x: token_log_probs(x, targets, temperature=temperature)),
        (logits.double(), lambda x: dense(x, targets, temperature)),
    ):
        leaf = x.requires_grad_()
        terms = [w * y for w, y in zip((g, h), compute(leaf * 1), strict=True) if w is not None]
        sum(terms).sum().backward()
        results.append(leaf.grad)
    return results


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_dense_whatever_the_chunk(tokens_per_chunk, temperature):
    logits, targets = batch()
    log_prob, entropy = token_log_probs(logits, targets, temperature=temperature)
    expected = dense(logits, targets, temperature)
    assert log_prob.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_prob.double(), expected[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), expected[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("terms", ["log_prob", "entropy", "both"])
def test_gradient_is_exact(tokens_per_chunk, terms):
    logits, targets = batch()
    g = torch.linspace(-2, 1, 7) if terms != "entropy" else None
    h = torch.linspace(1, -3, 7) if terms != "log_prob" else None
    ours, expected = gradients(logits, targets, g, h, 0.6)
    torch.testing.assert_close(ours.double(), expected, atol=2e-6, rtol=1e-5)


def test_bfloat16_gradient_is_the_exact_one_rounded_once():
    logits, targets = batch(torch.bfloat16)
    ours, expected = gradients(logits, targets, torch.ones(7), torch.ones(7), 1.0)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), expected, atol=1e-6, rtol=2**-8)


def test_padding_columns_take_no_part_and_get_no_gradient():
    logits, targets = batch()
    padded = torch.cat([logits, torch.full((7, 3), 100.0)], dim=1)
    log_prob, entropy = token_log_probs(padded, targets, vocab_size=11)
    expected = token_log_probs(logits, targets)
    torch.testing.assert_close((log_prob, entropy), expected, rtol=0, atol=0)
    for given in (lambda leaf: leaf * 1, lambda leaf: leaf):
        leaf = padded.clone().requires_grad_()
        sum(token_log_probs(given(leaf), targets, vocab_size=11)).sum().backward()
        assert (leaf.grad[:, 11:] == 0).all() and (leaf.grad[:, :11] != 0).any()


def test_gradient_takes_the_place_of_the_logits():
    logits, targets = batch()
    leaf = logits.clone().requires_grad_()
    computed = leaf * 1
    places = []
    computed.register_hook(lambda grad: places.append(grad.data_ptr()))
    token_log_probs(computed, targets)[0].sum().backward()
    assert places == [computed.data_ptr()]
    torch.testing.assert_close(computed.detach(), leaf.grad)


@pytest.mark.parametrize("view", [False, True], ids=["leaf", "view of a leaf"])
def test_a_leaf_is_left_alone(view):
    logits, targets = batch()
    leaf = logits.clone().requires_grad_()
    token_log_probs(leaf[:, :] if view else leaf, targets)[0].sum().backward()
    torch.testing.assert_close(leaf.detach(), logits, rtol=0, atol=0)
    assert leaf.grad.data_ptr() != leaf.data_ptr()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x, x], 1)[:, ::2],
        lambda x: torch.cat([x, x])[1:-3],
        lambda x: (x[:1] * 1).expand(7, 11),
    ],
    ids=["transposed", "every other column", "slice", "expanded"],
)
def test_views_of_any_stride_are_read_and_written_rightly(view):
    logits, _ = batch()
    leaf = logits.clone().requires_grad_()
    computed = view(leaf * 1)
    targets = torch.arange(len(computed)) % 11
    log_prob, entropy = token_log_probs(computed, targets)
    (log_prob - entropy).sum().backward()
    reference = logits.double().requires_grad_()
    expected = dense(view(reference * 1), targets)
    (expected[0] - expected[1]).sum().backward()
    torch.testing.assert_close(log_prob.double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(leaf.grad.double(), reference.grad, atol=1e-5, rtol=1e-5)


def test_second_backward_raises_where_the_first_wrote_over_the_logits():
    logits, targets = batch()
    leaf = logits.requires_grad_()
    log_prob, _ = token_log_probs(leaf * 1, targets)
    log_prob.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        log_prob.sum().backward()

    leaf.grad = None
    log_prob, _ = token_log_probs(leaf, targets)
    log_prob.sum().backward(retain_graph=True)
    once = leaf.grad.clone()
    log_prob.sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * once)


def test_another_reader_of_consumed_logits_raises_instead_of_reading_the_gradient():
    logits, targets = batch()
    computed = logits.requires_grad_() * 1
    first, _ = token_log_probs(computed, targets)
    second, _ = token_log_probs(computed, targets, temperature=0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (first + second).sum().backward()


def test_no_tokens():
    leaf = torch.empty(0, 11, requires_grad=True)
    log_prob, entropy = token_log_probs(leaf * 1, torch.empty(0, dtype=torch.long))
    (log_prob.sum() + entropy.sum()).backward()
    assert log_prob.shape == entropy.shape == (0,)
    assert leaf.grad.shape == (0, 11)


def test_forward_alone_leaves_the_logits_unchanged():
    logits, targets = batch()
    before = logits.clone()
    with torch.no_grad():
        log_prob, _ = token_log_probs(logits, targets)
    assert not log_prob.requires_grad
    torch.testing.assert_close(logits, before, rtol=0, atol=0)


def test_logits_masked_with_minus_infinity_give_finite_entropy_and_gradient():
    logits, targets = batch()
    logits[:, 9:] = -torch.inf
    leaf = logits.clone().requires_grad_()
    log_prob, entropy = token_log_probs(leaf * 1, targets)
    expected = token_log_probs(logits[:, :9], targets)
    torch.testing.assert_close((log_prob.detach(), entropy.detach()), expected)
    (log_prob + entropy).sum().backward()
    assert leaf.grad.isfinite().all() and (leaf.grad[:, 9:].abs() < 1e-20).all()


def test_a_target_outside_the_vocabulary_gives_nan():
    logits, _ = batch()
    targets = torch.tensor([0, -100, 10, 11, 5, 9, 1])
    log_prob, _ = token_log_probs(logits, targets, vocab_size=10)
    assert log_prob.isnan().tolist() == [False, True, True, True, False, False, False]
