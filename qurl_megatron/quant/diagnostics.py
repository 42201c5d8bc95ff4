"""Does the quantized policy notice the updates? Sums per shard, ratios only after adding them up.

Each measurement is a float64 pair (numerator, denominator). Pairs of shards, layers and ranks add;
only the totals are divided, because an average of ratios would weigh small tensors like large ones.
A shard that several ranks hold must be counted by one of them.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from qurl_megatron.quant.weights import QuantizedWeight, dequantize

# Float64 elements in flight at once: 32 MB, or as many as a core's own cache holds.
_CHUNK, _CHUNK_CPU = 4 << 20, 1 << 16


def code_flips(old_values: Tensor, new_values: Tensor) -> Tensor:
    """Return (codes that differ, codes), float64 [2]; codes are compared as bytes."""
    assert old_values.shape == new_values.shape, (old_values.shape, new_values.shape)
    changed = (old_values.view(torch.uint8) != new_values.view(torch.uint8)).sum()
    return torch.stack([changed, torch.full_like(changed, new_values.numel())]).double()


def weight_update(old: Tensor, new: Tensor) -> Tensor:
    """Return (||new - old||^2, ||old||^2) of Eq. 13, float64 [2]."""
    return _squares(old, lambda rows: new[rows])


def weight_error(weight: Tensor, quantized: QuantizedWeight) -> Tensor:
    """Return (||Q(w) - w||^2, ||w||^2) of Eq. 14, float64 [2]."""
    if quantized.block is not None:
        dequantized = dequantize(quantized)
        return _squares(weight, lambda rows: dequantized[rows])
    values, scale = quantized.values, quantized.scale
    return _squares(weight, lambda rows: values[rows].float() * scale[rows])


def update_passed(
    old: Tensor, new: Tensor, old_codes: QuantizedWeight, new_codes: QuantizedWeight
) -> Tensor:
    """Return (<dQ, dW>, ||dW||^2, ||dQ||^2), float64 [3], to tell how much of an update arrives.

    dW is the change of the weights, dQ the change of their codes' values. Over a model
    <dQ, dW> / ||dW||^2 is the share of the update that the engine sees, 1 in the mean of a rounding
    that loses nothing, however few codes change; the cosine of dQ and dW says with how much noise.

    Both weights and both codes must be on one device.
    """
    before, after = _dequantized(old_codes), _dequantized(new_codes)
    totals = torch.zeros(3, dtype=torch.float64, device=new.device)
    for rows in _row_slices(new):
        # The scales of a row may move by less than FP32 rounds a product to: all in float64.
        change = (new[rows].detach().double() - old[rows].detach().double()).flatten()
        moved = (after(rows) - before(rows)).flatten()
        totals += torch.stack([moved.dot(change), change.dot(change), moved.dot(moved)])
    return totals


def _squares(base: Tensor, other: Callable[[slice], Tensor]) -> Tensor:
    """Return (||other - base||^2, ||base||^2), summed over chunks of rows."""
    totals = torch.zeros(2, dtype=torch.float64, device=base.device)
    for rows in _row_slices(base):
        base_D = base[rows].detach().double().flatten()
        difference_D = other(rows).detach().double().flatten() - base_D
        totals[0] += difference_D.dot(difference_D)
        totals[1] += base_D.dot(base_D)
    return totals


def _dequantized(quantized: QuantizedWeight) -> Callable[[slice], Tensor]:
    """Return a function from rows to their float64 values, exact except for blocks of squares."""
    if quantized.block is not None:
        dequantized = dequantize(quantized)
        return lambda rows: dequantized[rows].double()
    values, scale = quantized.values, quantized.scale
    return lambda rows: values[rows].double().mul_(scale[rows])


def _row_slices(tensor: Tensor) -> Iterator[slice]:
    if tensor.numel() == 0:
        return
    elements = _CHUNK_CPU if tensor.device.type == "cpu" else _CHUNK
    step = max(1, elements // (tensor.numel() // len(tensor)))
    for start in range(0, len(tensor), step):
        yield slice(start, start + step)
