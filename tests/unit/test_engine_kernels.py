import pytest
import torch

from qurl_megatron.engines.embedded import kernels
from qurl_megatron.quant import activations, dequantize, quantize

SHAPES = [(1, 8, 8), (3, 96, 40), (33, 2816, 64)]


@pytest.mark.parametrize("tokens,inputs,outputs", SHAPES)
def test_int8_product_is_exact_at_the_largest_codes(tokens, inputs, outputs):
    torch.manual_seed(0)
    a = torch.randint(0, 2, (tokens, inputs)).mul(254).sub(127).to(torch.int8)
    w = torch.randint(0, 2, (outputs, inputs)).mul(254).sub(127).to(torch.int8)
    a[0], w[0] = 127, 127  # the sum that saturates 16-bit intermediate results
    assert torch.equal(activations.int8_matmul(a, w).long(), a.long() @ w.long().t())


def test_activations_round_half_to_even_and_a_zero_token_stays_zero():
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0]])
    codes, scale = kernels.quantize_int8(x)
    assert codes.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0]]
    assert scale[0].item() == 1.0
    assert scale[1].item() > 0  # 0 / 0 would be nan, whose cast to int8 is undefined


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_activation_leaves_the_int8_range(dtype):
    torch.manual_seed(0)
    x = (torch.randn(4096, 64) * torch.logspace(-30, 30, 4096)[:, None]).to(dtype)
    codes, scale = kernels.quantize_int8(x)
    assert codes.abs().max() == 127
    torch.testing.assert_close(
        codes.float() * scale, x.float(), rtol=0, atol=float(scale.max() / 2)
    )
    assert bool(((codes.float() * scale - x.float()).abs() <= scale * 0.5001).all())


@pytest.mark.parametrize(
    "scheme,linear", [("int8", kernels.int8_linear), ("fp8", kernels.fp8_linear)]
)
@pytest.mark.parametrize("with_addend", [False, True])
def test_quantized_linear_equals_the_product_of_dequantized_operands(scheme, linear, with_addend):
    torch.manual_seed(0)
    x, w = torch.randn(5, 64), torch.randn(24, 64)
    addend = torch.randn(5, 24) if with_addend else None
    q = quantize(w, scheme)
    stored = q.values if scheme == "int8" else q.values.float()
    quantize_tokens = kernels.quantize_int8 if scheme == "int8" else kernels.quantize_fp8
    codes, scale = quantize_tokens(x)
    expected = (codes.double() * scale) @ dequantize(q).double().t()
    expected = expected if addend is None else expected + addend
    actual = linear(x, stored, q.scale[:, 0], addend)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_rms_norm_normalizes_in_float32_and_scales_in_the_model_dtype():
    torch.manual_seed(0)
    x, w = torch.randn(4, 64).bfloat16() * 100, torch.randn(64).bfloat16()
    x32 = x.float()
    normal = (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    torch.testing.assert_close(kernels.rms_norm(x, w, 1e-6), w * normal, rtol=1e-2, atol=1e-6)
