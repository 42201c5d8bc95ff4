"""Code flips and Eqs. 13 and 14 as sums that add over shards."""

import pytest
import torch

from qurl_megatron.quant import (
    QUANT_METRICS,
    code_flips,
    dequantize,
    diagnostics,
    quant_metrics,
    quantize,
    weight_error,
    weight_update,
)


def test_code_flips_count_bytes():
    old, new = torch.tensor([[1, 2, -3]]).to(torch.int8), torch.tensor([[1, 3, 3]]).to(torch.int8)
    assert code_flips(old, new).tolist() == [2.0, 3.0]
    old, new = (torch.tensor([x]).to(torch.float8_e4m3fn) for x in ([1.0, 2.0], [1.0, 2.25]))
    assert code_flips(old, new).tolist() == [1.0, 2.0]


def test_equations_13_and_14_by_hand():
    assert weight_update(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])).tolist() == [
        0.25,
        25.0,
    ]
    w = torch.tensor([[127.0, 0.25]])  # scale 1: the error is 0.25
    assert weight_error(w, quantize(w, "int8")).tolist() == [0.0625, 127.0**2 + 0.0625]


@pytest.mark.parametrize("scheme", ["int8", "fp8", "fp8_block"])
def test_weight_error_is_the_squared_distance_to_the_grid(scheme):
    w = torch.randn(300, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    quantized = quantize(w, scheme)
    distance = (dequantize(quantized).double() - w.double()).square().sum()
    expected = torch.stack([distance, w.double().square().sum()])
    torch.testing.assert_close(weight_error(w, quantized), expected)


def test_updates_far_below_float32_sums_are_not_lost(monkeypatch):
    monkeypatch.setattr(diagnostics, "_CHUNK", 1000)
    old = torch.ones(1000, 100)
    new = old.clone()
    new[0, 0] += 2**-20
    part, whole = weight_update(old, new).tolist()
    assert part == 2**-40 and whole == 1e5


def test_sums_of_shards_are_the_sums_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(64, 32, generator=generator)
    new = old + 0.01 * torch.randn(64, 32, generator=generator)
    before, after = quantize(old, "int8"), quantize(new, "int8")

    def table(rows):
        return torch.stack(
            [
                code_flips(before.values[rows], after.values[rows]),
                weight_update(old[rows], new[rows]),
                weight_error(new[rows], quantize(new[rows], "int8")),
            ]
        )

    total = table(slice(0, 16)) + table(slice(16, 64))
    torch.testing.assert_close(total, table(slice(0, 64)))
    metrics = quant_metrics(total)
    assert list(metrics) == list(QUANT_METRICS)
    assert metrics["quant/weight_update"] == pytest.approx(1e-4, rel=0.2)
    assert 0.1 < metrics["quant/code_flip_rate"] < 0.5
    assert 0 < metrics["quant/weight_error"] < 1e-4


def test_what_was_not_measured_is_left_out():
    totals = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 4.0]])
    assert quant_metrics(totals) == {"quant/weight_error": 0.25}
    empty = torch.empty(0, 4)
    assert weight_update(empty, empty).tolist() == [0, 0]
