import pytest
import torch

from qurl_megatron.engines.embedded import kernels
from qurl_megatron.quant import dequantize, products, quantize
from tests.support.engine_models import decoding_by


@pytest.fixture
def by_torch():
    with decoding_by("torch"):
        yield


SHAPES = [(1, 8, 8), (3, 96, 40), (33, 2816, 64)]


@pytest.mark.parametrize("tokens,inputs,outputs", SHAPES)
def test_int8_product_is_exact_at_the_largest_codes(tokens, inputs, outputs):
    torch.manual_seed(0)
    a = torch.randint(0, 2, (tokens, inputs)).mul(254).sub(127).to(torch.int8)
    w = torch.randint(0, 2, (outputs, inputs)).mul(254).sub(127).to(torch.int8)
    a[0], w[0] = 127, 127  # the sum that saturates 16-bit intermediate results
    assert torch.equal(products.int8_matmul(a, w).long(), a.long() @ w.long().t())


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


@pytest.mark.parametrize("tokens", [1, 8, 33])
@pytest.mark.parametrize("largest", [127.0, 7.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_give_the_bits_of_plain_ones(tokens, largest, dtype, monkeypatch, by_torch):
    monkeypatch.setattr(kernels, "PACK_FROM", 0)
    torch.manual_seed(0)
    x, addend = torch.randn(tokens, 96).to(dtype), torch.randn(tokens, 40).to(dtype)
    x[0] = x[0].abs().max() * x[0].sign()  # codes of +-largest alone
    w = torch.randint(-127, 128, (40, 96), dtype=torch.int8)
    w[0] = 127
    scale = torch.rand(40) + 0.1
    packed = kernels.pack(w, scale)
    assert packed is not None
    for more in (None, addend):
        plain = kernels.int8_linear(x, w, scale, more, largest)
        assert torch.equal(kernels.int8_linear(x, w, scale, more, largest, packed), plain)


def test_small_matrices_stay_as_they_are(by_torch):
    w = torch.zeros(384, 128, dtype=torch.int8)
    assert kernels.pack(w, torch.ones(384)) is None


def test_a_processor_that_overflows_in_packed_products_gets_none(monkeypatch, by_torch):
    saturated = torch.full((64, 64), 64.0 * 32767 / 2)
    monkeypatch.setattr(kernels, "PACK_FROM", 0)
    monkeypatch.setattr(kernels.Packed, "times", lambda *_: saturated)
    kernels._packed_product_is_exact.cache_clear()
    try:
        assert kernels.pack(torch.zeros(64, 64, dtype=torch.int8), torch.ones(64)) is None
    finally:
        kernels._packed_product_is_exact.cache_clear()


def test_rms_norm_normalizes_in_float32_and_scales_in_the_model_dtype():
    torch.manual_seed(0)
    x, w = torch.randn(4, 64).bfloat16() * 100, torch.randn(64).bfloat16()
    x32 = x.float()
    normal = (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    torch.testing.assert_close(kernels.rms_norm(x, w, 1e-6), w * normal, rtol=1e-2, atol=1e-6)
