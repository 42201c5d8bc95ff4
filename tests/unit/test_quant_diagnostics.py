"""Code flips, Eqs. 13 and 14 and what passes of an update, as sums that add over shards."""

import pytest
import torch

from qurl_megatron.config import QuantConfig
from qurl_megatron.observe.metrics import merge, values
from qurl_megatron.publish.drift import Drift, of_an_update
from qurl_megatron.quant import (
    QuantizedWeight,
    code_flips,
    dequantize,
    diagnostics,
    quantize,
    rounding_of,
    update_passed,
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
    monkeypatch.setattr(diagnostics, "_CHUNK_CPU", 1000)
    old = torch.ones(1000, 100)
    new = old.clone()
    new[0, 0] += 2**-20
    part, whole = weight_update(old, new).tolist()
    assert part == 2**-40 and whole == 1e5


def codes(*rows, scale):
    return QuantizedWeight(torch.tensor(rows, dtype=torch.int8), torch.tensor(scale))


def test_what_passes_of_an_update_by_hand():
    # dW = (0.4, -0.2), dQ = (0.5, 0): the first code goes from 2 to 3 on a grid of 0.5.
    old, new = torch.tensor([[1.1, 0.9]]), torch.tensor([[1.5, 0.7]])
    passed = update_passed(old, new, codes([2, 2], scale=[[0.5]]), codes([3, 2], scale=[[0.5]]))
    torch.testing.assert_close(passed, torch.tensor([0.2, 0.2, 0.25]).double(), rtol=1e-6, atol=0)
    # No code changes, but the grid does: dQ = (0.2, 0.2).
    passed = update_passed(old, new, codes([2, 2], scale=[[0.5]]), codes([2, 2], scale=[[0.6]]))
    torch.testing.assert_close(passed, torch.tensor([0.04, 0.2, 0.08]).double(), rtol=1e-6, atol=0)


def test_a_scale_that_moves_by_one_bit_is_seen():
    weight, scale = torch.zeros(1, 1), torch.tensor([[1.0]])
    moved = torch.nextafter(scale, torch.tensor(2.0))
    before, after = (QuantizedWeight(torch.tensor([[101]]).char(), s) for s in (scale, moved))
    seen = update_passed(weight, weight, before, after)[2].item()
    assert seen == (101 * 2**-23) ** 2


def versions(step):
    """A weight, and the same with an update of every element."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(256, 384, generator=generator)
    return old, old + step * torch.randn(256, 384, generator=generator)


@pytest.mark.parametrize("scheme", ["int8", "fp8", "fp8_block"])
def test_an_update_below_the_grid_passes_whole_in_the_mean_with_much_noise(scheme):
    old, new = versions(3e-4)
    before, after = quantize(old, scheme), quantize(new, scheme)
    flipped, count = code_flips(before.values, after.values).tolist()
    together, update, seen = update_passed(old, new, before, after).tolist()
    assert flipped / count < 0.02
    assert together / update == pytest.approx(1.0, abs=0.2)
    assert 0.05 < together / (update * seen) ** 0.5 < 0.15
    change = dequantize(after).double() - dequantize(before).double()
    expected = (change * (new.double() - old.double())).sum().item()
    assert together == pytest.approx(expected, rel=1e-4)


def drift_of(*shards, scheme="int8"):
    """Metrics of each rank's drift; a rank has rows and columns of the weights (old, new)."""
    found = []
    for old, new, rows, columns in shards:
        drift = Drift(QuantConfig(scheme=scheme))
        for version, weight in enumerate((old, new)):
            whole = quantize(weight, scheme)
            part = QuantizedWeight(whole.values[rows, columns], whole.scale[rows])
            drift.observe("w", weight[rows, columns], part, version)
        found.append(drift.metrics())
    return found


def test_what_passes_is_that_of_the_whole_however_rows_and_columns_are_split():
    old, new = versions(1e-4)
    every = slice(None)
    (whole,) = drift_of((old, new, every, every))
    parts = [
        (old, new, rows, columns)
        for rows in (slice(0, 100), slice(100, 256))  # column-parallel, or stages of a pipeline
        for columns in (slice(0, 200), slice(200, 384))  # row-parallel: the ranks share scales
    ]
    together, alone = values(merge(drift_of(*parts))), values(whole)
    assert together == pytest.approx(alone, rel=1e-12)
    assert 0.8 < alone["quant/update_passed"] < 1.2 and 0 < alone["quant/update_cosine"] < 1


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_without_an_update_nothing_is_said_of_it(rounding):
    weight, _ = versions(0.0)
    drift = Drift(QuantConfig(rounding=rounding))
    for version in (0, 1):
        drawn = rounding_of(
            rounding,
            seed=0,
            version=version,
            name="w",
            shape=weight.shape,
            split_dim=None,
            offset=0,
        )
        drift.observe("w", weight, quantize(weight, "int8", rounding=drawn), version)
    metrics = values(of_an_update(merge([drift.metrics(), {}])))
    assert not [name for name in metrics if name.startswith("quant/update_")]
    assert (metrics["quant/code_flip_rate"] > 0) == (rounding == "stochastic")


@pytest.mark.parametrize("every", [1, 2])
def test_a_version_that_is_sent_again_is_measured_once(every):
    old, new = versions(1e-2)
    shards = {"first": (old, new), "second": (old + 1, new + 1)}

    def told(*publications):
        drift = Drift(QuantConfig(diagnostics_every=every))
        for version, names in publications:
            for name in names:
                weight = shards[name][version - 1]
                drift.observe(name, weight, quantize(weight, "int8"), version)
        return drift.metrics()

    both = tuple(shards)
    expected = told((1, both), (2, both))
    assert expected["quant/code_flip_rate"].weight == 2 * old.numel()
    assert told((1, both), (2, ["first"]), (2, both), (2, both)) == expected


def test_what_was_held_of_an_older_version_is_not_compared_with():
    old, new = versions(1e-2)
    drift = Drift(QuantConfig())
    for version, weight in ((1, old), (3, new)):
        drift.observe("w", weight, quantize(weight, "int8"), version)
    assert not drift.metrics()


def test_an_update_that_no_code_shows_has_passed_nothing():
    drift = Drift(QuantConfig())
    code = codes([127, 3], scale=[[1.0]])
    for version, weight in enumerate(([[127.0, 3.0]], [[127.0, 3.25]])):
        drift.observe("w", torch.tensor(weight), code, version)
    metrics = values(drift.metrics())
    assert metrics["quant/update_passed"] == 0 and metrics["quant/update_cosine"] == 0


def test_a_rank_without_an_update_still_counts_where_its_scales_moved():
    # Row-parallel: the second rank's part of the row stays, and its grid follows the first's.
    old, new = torch.tensor([[127.0, 1.0]]), torch.tensor([[130.0, 1.0]])
    shards = [(old, new, slice(None), columns) for columns in (slice(0, 1), slice(1, 2))]
    first, second = drift_of(*shards)
    assert second["quant/update_cosine"].value == 0
    (whole,) = drift_of((old, new, slice(None), slice(None)))
    assert values(merge([first, second])) == pytest.approx(values(whole), rel=1e-12)
    assert first["quant/update_cosine"].value == 1 > whole["quant/update_cosine"].value
