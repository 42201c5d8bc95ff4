"""Weights on the INT8 and FP8 grids: rounding by hand, round trips, slices of the whole."""

import pytest
import torch

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.quant import dequantize, quantize, quantize_tokens, rounding_of
from qurl_megatron.quant import weights as quant_weights

SCHEMES = ["int8", "fp8", "fp8_block", "int6", "int4"]


def weight(rows=300, columns=256, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(rows, columns, generator=generator) * 0.02).to(dtype)


def codes(values):
    return values.view(torch.uint8)


def test_int8_rounds_half_to_even():
    # amax 127 makes the scale 1, so the weights are their own grid positions.
    row = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49, -126.6]])
    quantized = quantize(row, "int8")
    assert quantized.scale.tolist() == [[1.0]] and quantized.scale.dtype == torch.float32
    assert quantized.values.tolist() == [[127, 0, 2, 2, 0, -2, -2, 0, -127]]
    assert quantized.values.dtype == torch.int8


def test_fp8_rounds_half_to_even():
    # Between 16 and 32 the grid of E4M3 has steps of 2, between 256 and 448 of 32.
    row = torch.tensor([[448.0, 17.0, 19.0, -17.0, 272.0, 304.0, 0.001, -448.0]])
    quantized = quantize(row, "fp8")
    assert quantized.scale.tolist() == [[1.0]]
    assert quantized.values.dtype == torch.float8_e4m3fn
    assert quantized.values.float().tolist() == [[448, 16, 20, -16, 256, 320, 2**-9 * 1.0, -448]]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tiny", [0.0, 1e-44])
def test_zeros_and_weights_too_small_for_a_scale_become_zero_and_not_nan(scheme, tiny):
    w = torch.full((256, 256), tiny)
    w[128:] = 1.0
    quantized = quantize(w, scheme)
    assert quantized.scale[0, 0] == 1 and (quantized.values[:128].float() == 0).all()
    assert torch.equal(dequantize(quantized)[128:], w[128:])


@pytest.mark.parametrize("scheme, step", [("int8", 0.5), ("fp8", 16.0), ("fp8_block", 16.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_error_is_at_most_half_a_step_of_the_grid(scheme, step, dtype):
    w = weight(dtype=dtype)
    quantized = quantize(w, scheme)
    scale = quantized.scale if quantized.block is None else quantized.scale.max()
    assert ((dequantize(quantized) - w.float()).abs() <= step * scale * (1 + 1e-4)).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_grid_is_a_fixed_point(scheme):
    quantized = quantize(weight(), scheme)
    again = quantize(dequantize(quantized), scheme)
    assert torch.equal(codes(again.values), codes(quantized.values))
    torch.testing.assert_close(again.scale, quantized.scale, rtol=2e-7, atol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["nearest", "stochastic"])
@pytest.mark.parametrize("run, scratch", [(1, 1), (256 * 200, 256 * 128), (250 * 128, 1)])
def test_runs_and_their_parts_do_not_show(scheme, dtype, kind, run, scratch, monkeypatch):
    w = weight(columns=250, dtype=dtype)
    place = {"name": "w", "shape": w.shape, "split_dim": None, "offset": 0}
    rounding = rounding_of(kind, seed=3, version=7, **place)
    whole = quantize(w, scheme, rounding=rounding)
    monkeypatch.setattr(quant_weights, "_RUN_CPU", run)
    monkeypatch.setattr(quant_weights, "_SCRATCH_CPU", scratch)
    chunked = quantize(w, scheme, rounding=rounding)
    assert torch.equal(codes(chunked.values), codes(whole.values))
    assert torch.equal(chunked.scale, whole.scale)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_are_written_where_the_caller_wants_them(scheme):
    w = weight()
    expected = quantize(w.t().contiguous().t(), scheme)
    place = torch.empty_like(expected.values)
    written = quantize(w, scheme, out=place)
    assert torch.equal(w, weight())  # which is not modified
    assert written.values is place and torch.equal(codes(place), codes(expected.values))
    assert torch.equal(written.scale, expected.scale)


def test_block_scales_of_a_ragged_weight():
    w = weight(rows=300, columns=200)
    w[299, 199] = 4.48
    w[0, 0] = -8.96
    quantized = quantize(w, "fp8_block")
    assert quantized.scale.shape == (3, 2)
    torch.testing.assert_close(quantized.scale[2, 1].item(), 0.01)
    torch.testing.assert_close(quantized.scale[0, 0].item(), 0.02)
    expected = w[128:256, :128].abs().max() / 448
    torch.testing.assert_close(quantized.scale[1, 0], expected, rtol=0, atol=0)
    inner = (w[256:, 128:] / quantized.scale[2, 1]).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes(inner), codes(quantized.values[256:, 128:]))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_inf_and_nan_are_refused(scheme, bad):
    w = weight()
    w[7, 3] = bad
    with pytest.raises(ConfigError, match=r"shape \(300, 256\) that has inf or nan"):
        quantize(w, scheme)


def test_unknown_schemes_and_shapes_are_named():
    with pytest.raises(ConfigError, match="'int3'.*fp8_block"):
        quantize(weight(), "int3")
    with pytest.raises(ConfigError, match=r"\(3,\)"):
        quantize(torch.ones(3), "int8")


def test_a_weight_without_elements():
    for shape in ((0, 4), (4, 0)):
        for scheme in SCHEMES:
            quantized = quantize(torch.empty(shape), scheme)
            assert quantized.values.shape == shape and dequantize(quantized).shape == shape


def test_tokens_in_groups_of_128_features():
    x = weight(3, 200)
    values, scale = quantize_tokens(x, "fp8_block")
    assert values.shape == (3, 200) and scale.shape == (3, 2)
    for part, group in ((slice(0, 128), 0), (slice(128, 200), 1)):
        alone, alone_scale = quantize_tokens(x[:, part], "fp8")
        assert torch.equal(codes(values[:, part]), codes(alone))
        assert torch.equal(scale[:, group : group + 1], alone_scale)


def test_zero_tokens_and_tokens_of_zeros():
    for scheme in SCHEMES:
        values, scale = quantize_tokens(torch.zeros(2, 8), scheme)
        assert (values.float() == 0).all()
        assert (scale > 0).all() and (scale < 1e-37).all()
        values, scale = quantize_tokens(torch.empty(0, 8), scheme)
        assert values.shape == (0, 8) and scale.shape == (0, 1)
        _, scale = quantize_tokens(torch.tensor([[1.0, torch.nan], [1.0, 2.0]]), scheme)
        assert scale.isnan().flatten().tolist() == [True, False]
