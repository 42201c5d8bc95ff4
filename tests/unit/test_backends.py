"""Other packages' quantizers against ours: ModelOpt bit for bit, Transformer Engine nearly so."""

import importlib.util

import pytest
import torch

from qurl_megatron.checkpoints.backends import BACKENDS, by_modelopt, check_backend, cropped
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.quant import dequantize, quantize
from qurl_megatron.schemes import EXPORTED

# ModelOpt is imported by the tests that run it: that takes 7 s.
modelopt = pytest.mark.skipif(
    importlib.util.find_spec("modelopt") is None, reason="nvidia-modelopt is not installed"
)


def weight(rows=300, columns=200, dtype=torch.float32):
    """Random rows, and rows of zeros, of ties of both grids on a scale of 1, of tiny numbers."""
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.02
    w[0] = 0.0
    w[1] = torch.arange(columns) % 254 - 126.5
    w[1, 0] = -127.0
    w[2] = torch.arange(columns) % 56 * 8.0 - 220  # steps of the grid: 16 from 128 on, 8 from 64
    w[2, 0] = 448.0
    w[3] = 1e-30
    w[4, -1] = -1e4
    return w.to(dtype)


def assert_same(actual, expected):
    assert actual.values.dtype == expected.values.dtype and actual.block == expected.block
    assert torch.equal(actual.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert actual.scale.shape == expected.scale.shape
    torch.testing.assert_close(actual.scale, expected.scale, rtol=0, atol=0)


@modelopt
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", EXPORTED)
def test_modelopt_finds_the_same_codes_and_scales(scheme, dtype):
    for shape in [(300, 200), (256, 128), (128, 384), (5, 3)]:
        w = weight(*shape, dtype)
        assert_same(by_modelopt(w, scheme), quantize(w, scheme))
    channel = w[4:5]
    assert_same(by_modelopt(channel, scheme), quantize(channel, scheme))


def test_a_backend_that_cannot_run_here_says_what_to_use(monkeypatch):
    for scheme in EXPORTED:
        check_backend("native", scheme)
    with pytest.raises(ConfigError, match="fp8_block alone, not int8; use backend native"):
        check_backend("te", "int8")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'qurl-megatron\[modelopt\]'"):
        check_backend("modelopt", "int8")
    with pytest.raises(ConfigError, match=r"pip install 'qurl-megatron\[gpu\]'"):
        check_backend("te", "fp8_block")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="compute capability 9.0"):
        check_backend("te", "fp8_block")


def assert_nearly_same(theirs, ours):
    """Two reciprocals are two more roundings: of the scale, and of what lies next to a tie."""
    torch.testing.assert_close(theirs.scale, ours.scale, rtol=2**-22, atol=0)
    flipped = theirs.values.view(torch.uint8) != ours.values.view(torch.uint8)
    # The same arithmetic on the CPU: less than 1 of 10^6 codes of random FP32 weights, 350 of BF16.
    assert flipped.float().mean() < 2e-3
    # E4M3 has 3 bits of mantissa: a neighbouring code is at most 1/8 away, or the smallest step.
    step = torch.maximum(dequantize(ours).abs() / 8, dequantize(ours).abs().max() * 2**-17)
    difference = (dequantize(theirs) - dequantize(ours)).abs()
    assert (difference <= 1.01 * step).all()


def test_what_transformer_engine_pads_is_cropped():
    w = weight()
    whole = quantize(torch.nn.functional.pad(w, (0, 56, 0, 84)), "fp8_block")
    scale = torch.nn.functional.pad(whole.scale, (0, 2), value=torch.nan)
    assert whole.values.shape == (384, 256) and scale.shape == (3, 4)
    codes = whole.values.view(torch.uint8)
    assert_same(cropped(codes, scale, w.shape, w.device), quantize(w, "fp8_block"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transformer_engine_casts_to_nearly_the_same_codes(dtype):
    pytest.importorskip("transformer_engine")
    for shape in [(256, 384), (300, 200)]:
        w = weight(*shape, dtype)
        theirs = BACKENDS["te"](w, "fp8_block")
        assert theirs.values.device == w.device
        assert_nearly_same(theirs, quantize(w, "fp8_block"))
