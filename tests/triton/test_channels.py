"""Weights quantized by the kernels, bit for bit what torch's operations give on a CPU."""

import pytest
import torch

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.fused import SWITCH
from qurl_megatron.quant import quantize, rounding_of

FORMATS = [torch.float32, torch.bfloat16, torch.float16]
SCHEMES = ["int8", "fp8", "int6", "int4"]
LARGEST = {"int8": 127.0, "fp8": 448.0, "int6": 31.0, "int4": 7.0}


@pytest.fixture(params=["one pass", "two passes"])
def passes(request, device, monkeypatch) -> None:
    """Rows that stay in registers, and rows as if they were too long for them."""
    from qurl_megatron.quant import fused_channels as channels

    if request.param == "two passes":
        monkeypatch.setattr(channels, "HELD", 0)


def assert_same(weight, scheme, device, rounding=None):
    """Codes and scales of the kernels, of torch on the CPU, and of torch on the device."""
    found = quantize(weight.to(device), scheme, rounding=rounding)
    for place in {"cpu", device}:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv(SWITCH, "0")
            expected = quantize(weight.to(place), scheme, rounding=rounding)
        assert found.values.dtype == expected.values.dtype
        assert torch.equal(bits(found.scale), bits(expected.scale)), place
        assert torch.equal(bits(found.values), bits(expected.values)), place


def bits(tensor):
    return tensor.cpu().contiguous().view(torch.uint8)


def edges(dtype):
    """Rows that are empty but for zeros, tiny, huge, mixed, subnormal or equal throughout."""
    limits = torch.finfo(dtype)
    subnormal = limits.tiny * limits.eps
    rows = [
        [0.0] * 6,
        [-0.0, 0.0, -0.0, -0.0, 0.0, -0.0],
        [subnormal, -subnormal, 0.0, -0.0, 0.0, 0.0],
        [limits.tiny, -limits.tiny / 2, limits.tiny * 100, limits.tiny * 126, 0.0, 0.0],
        [limits.tiny * 127, limits.tiny * 128, limits.tiny * 447, limits.tiny * 450, 0.0, 1e-30],
        [limits.max, -limits.max, limits.max / 2, limits.tiny, 1.0, -1.0],
        [1.0, -1.0, 1.0, 1.0, -1.0, 1.0],
        [1e-3, -5e-5, 0.1, 0.02, -0.7, 0.3],
        [-127.0, 0.5, 1.5, 2.5, -0.5, -126.5],
    ]
    return torch.tensor(rows, dtype=torch.float64).clamp(-limits.max, limits.max).to(dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_at_the_edges_of_the_formats(device, passes, dtype, scheme):
    assert_same(edges(dtype), scheme, device)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", FORMATS[:2])
def test_rows_of_any_size_and_length(device, dtype, scheme):
    generator = torch.Generator().manual_seed(0)
    for length in (1, 37, 128, 5000):
        size = torch.logspace(-30, 30, 16)[:, None]
        assert_same((torch.randn(16, length, generator=generator) * size).to(dtype), scheme, device)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_step_of_the_grid_rounds_half_to_even(device, scheme):
    """At scale 1: each grid point, each middle between two, and the next float32 to either side."""
    largest = LARGEST[scheme]
    if scheme == "fp8":
        grid = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    else:
        grid = torch.arange(largest + 1)
    points = torch.cat([grid, (grid[1:] + grid[:-1]) / 2])
    beside = [points.nextafter(torch.tensor(end)) for end in (torch.inf, -torch.inf)]
    points = torch.cat([points, *beside]).clamp(max=largest)
    assert_same(torch.cat([points, -points])[None], scheme, device)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_every_bfloat16_that_fits(device, scheme):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    fits = every[every.float().abs() <= LARGEST[scheme]]  # no nan
    rows = torch.nn.functional.pad(fits, (0, -len(fits) % 16)).view(16, -1)
    rows = torch.cat([rows, torch.full((16, 1), LARGEST[scheme], dtype=torch.bfloat16)], dim=1)
    assert_same(rows, scheme, device)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", FORMATS[:2])
def test_rows_too_long_for_one_pass_give_the_same(device, dtype, scheme):
    from qurl_megatron.quant import fused_channels as channels

    weight = torch.randn(3, channels.HELD + 17, generator=torch.Generator().manual_seed(0))
    weight[1] = 0
    assert_same(weight.to(dtype), scheme, device)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_the_kernels_draw_what_torch_draws(device, passes, scheme, dim):
    place = {"shape": (1000, 70001), "split_dim": dim, "offset": 501}
    for weight in (
        edges(torch.float32),
        torch.randn(5, 317, generator=torch.Generator().manual_seed(0)).bfloat16(),
        torch.linspace(-448, 448, 4 * 1001).view(4, 1001) * 2**-12,  # E4M3's subnormals too
    ):
        for version in range(3):
            drawn = rounding_of("stochastic", seed=0, version=version, name="x", **place)
            assert_same(weight, scheme, device, drawn)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_inf_and_nan_are_refused(device, passes, scheme, bad):
    for dtype in FORMATS:
        weight = torch.ones(4, 300, dtype=dtype, device=device)
        weight[2, 299] = bad
        with pytest.raises(ConfigError, match=r"shape \(4, 300\) that has inf or nan"):
            quantize(weight, scheme)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_slices_and_transposes_give_what_their_copies_give(device, scheme):
    whole = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    before = whole.clone()
    for view in (whole.t(), whole[3:20, 5:44], whole[:, ::2], whole[::3]):
        assert_same(view, scheme, device)
    assert torch.equal(whole, before)


def test_the_kernels_are_what_runs_unless_they_are_switched_off(device, monkeypatch):
    from qurl_megatron.quant import fused_channels as channels

    calls = []
    kernel = channels.round_rows
    monkeypatch.setattr(channels, "round_rows", lambda *args: calls.append(args) or kernel(*args))
    weight = torch.ones(2, 4, device=device)
    quantize(weight, "int8")
    assert len(calls) == 1
    monkeypatch.setenv(SWITCH, "0")
    quantize(weight, "int8")
    assert len(calls) == 1
