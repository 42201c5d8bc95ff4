"""Tokens are rounded by one definition, or by SGLang's where its own kernels run."""

import pytest
import torch

from qurl_megatron.engines.embedded import native
from qurl_megatron.quant import activations, quantize, quantize_tokens
from qurl_megatron.quant.rounding import scheme_named
from qurl_megatron.schemes import SCHEMES

# [T, I, O]
SHAPES = [(1, 8, 8), (3, 96, 40), (33, 2816, 64)]
ROW_WISE = [name for name, row in SCHEMES.items() if row.stored and row.block is None]


def tokens() -> torch.Tensor:
    """Of all sizes; among them zeros, halves of a code, and magnitudes that hardly have a scale."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-20, 20, 64)[:, None]
    x[0] = 0
    x[1] = 1e-38
    x[2] = x[2].abs().max() * (torch.arange(96) % 15 - 7) / 14
    return x


@pytest.mark.skipif(not native.available(), reason="no native step")
@pytest.mark.parametrize("scheme", [name for name in ROW_WISE if name != "fp8"])
def test_the_native_step_rounds_by_the_definition(scheme):
    x = tokens()
    identity = native.Blocks(torch.eye(96, dtype=torch.int8), torch.ones(96))
    values, scale = quantize_tokens(x, scheme)
    expected = values.float() * scale  # a zero's sign is the sum's that it came from
    assert torch.equal(identity.linear(x, None, scheme_named(scheme).largest), expected)


@pytest.mark.parametrize("scheme", ROW_WISE)
def test_a_part_of_a_token_is_rounded_as_in_the_whole_given_its_largest_magnitude(scheme):
    x = tokens()
    whole, whole_scale = quantize_tokens(x, scheme)
    amax = x.abs().amax(1, keepdim=True)
    part, scale = quantize_tokens(x[:, 40:], scheme, amax=amax)
    assert torch.equal(part.float(), whole[:, 40:].float()) and torch.equal(scale, whole_scale)


def test_sglangs_int8_kernel_rounds_halves_away_from_zero():
    # By hand: 127 / 127 = 1, so codes are the numbers, rounded.
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, 0.49999997], [0.0, 0.0, 0.0, 0.0, 0.0]])
    codes, scale = quantize_tokens(x, "int8", arithmetic="sglang")
    assert codes.tolist() == [[127, 1, 2, -3, 0], [0, 0, 0, 0, 0]]
    torch.testing.assert_close(scale, torch.tensor([[1.0], [1e-10 / 127]]))
    ours, _ = quantize_tokens(x, "int8")
    assert ours.tolist()[0] == [127, 0, 2, -2, 0]


def test_sglangs_fp8_kernel_multiplies_by_the_reciprocal_of_the_scale():
    # By hand: 448 / 448 = 1, so codes are the numbers, rounded to steps of 1 from 8 to 16. Of 3 the
    # scale is 3 / 448, and 13.5 of those divided by it are 13.5, a tie, which goes to 14; times the
    # reciprocal they are 13.499999, which goes to 13.
    x = torch.tensor([[448.0, 13.25, -13.75], [3.0, 13.5 * 3 / 448, -1.5], [0.0, 0.0, 0.0]])
    codes, scale = quantize_tokens(x, "fp8", arithmetic="sglang")
    assert codes.float().tolist() == [[448, 13, -14], [448, 13, -224], [0, 0, 0]]
    torch.testing.assert_close(scale, torch.tensor([[1.0], [3 / 448], [0.0]]))
    ours, _ = quantize_tokens(x, "fp8")
    assert ours.float().tolist()[1] == [448, 14, -224]


@pytest.mark.parametrize("scheme", ROW_WISE)
def test_weights_are_rounded_as_tokens_are(scheme):
    x = tokens()[3:]
    codes, scale = quantize_tokens(x, scheme)
    weight = quantize(x, scheme)
    assert torch.equal(codes.float(), weight.values.float()) and torch.equal(scale, weight.scale)


@pytest.mark.parametrize("vnni", [True, False], ids=["integers", "slices in FP32"])
@pytest.mark.parametrize("tokens,inputs,outputs", SHAPES)
def test_int8_product_is_exact_at_the_largest_codes(tokens, inputs, outputs, vnni, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)
    torch.manual_seed(0)
    a = torch.randint(96, 128, (tokens, inputs)).to(torch.int8)
    w = torch.randint(96, 128, (outputs, inputs)).to(torch.int8)
    a[0], w[0] = 127, 127  # the sum that saturates 16-bit intermediate results
    a[-1], w[-1] = -128, -128  # the largest sum there is
    assert torch.equal(activations.int8_matmul(a, w).long(), a.long() @ w.long().t())
