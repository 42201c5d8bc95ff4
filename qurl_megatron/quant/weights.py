"""Weights on the rollout model's grid, so that shards quantize to the shards of the whole.

A pass over memory costs more than the arithmetic in it, so a weight is gone through once, a run of
rows at a time: extremes, scales and codes of a run are made while it is in the caches. On a GPU
with Triton, ``quant.fused_channels`` computes the same codes and scales in one pass.

Shapes: O = output channels, I = input channels. A scale belongs to a square of h x w elements:
1 x I where each channel has one, 128 x 128 for fp8_block. R x C squares cover the weight.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.fused import has_kernels_for
from qurl_megatron.quant.rounding import Draws, Rounding, round_to_grid_, scale_of, scheme_named
from qurl_megatron.schemes import Scheme, scale_grid

# Float32 elements in flight at once, however large the weight: of a run, which shares the operators
# that find its scales, and of the scratch in which a part of it becomes codes. On a CPU a run is
# small enough to be in a cache when it is read again, and large enough that the calls do not cost
# more than the work; the scratch fits a core's own cache.
_RUN, _SCRATCH = 8 << 20, 8 << 20
_RUN_CPU, _SCRATCH_CPU = 1 << 20, 1 << 17


@dataclass(frozen=True)
class QuantizedWeight:
    """``values * scale`` is the weight; engines load both tensors."""

    values: Tensor  # [O, I] int8 or float8_e4m3fn
    scale: Tensor  # float32 [O, 1], or [ceil(O / block), ceil(I / block)]
    block: int | None = None  # edge of the squares that share a scale; None: a scale per row


def quantize(
    weight: Tensor,
    scheme: str,
    *,
    input_group: dist.ProcessGroup | None = None,
    rounding: Rounding | None = None,
    out: Tensor | None = None,
    check: bool = True,
) -> QuantizedWeight:
    """Round a weight to the nearest point of the scheme's grid, or to one of the two beside it.

    Args:
        weight: [O, I] in any float format, whole or one tensor-parallel shard; not modified.
        scheme: "int8", "fp8" or "fp8_block"; "int4", "int5" and "int6" are simulated in int8.
        input_group: group over which the input dimension is split (row-parallel layers); its ranks
            agree on one scale per channel. None for whole and column-parallel weights.
        rounding: the draws that choose between the codes beside a weight; None: the nearest one.
        out: where the codes are written, [O, I] in the scheme's format; None: memory of their own.
        check: wait for a GPU and refuse inf and nan; False leaves it to the caller, who finds them
            in the scales.

    For fp8_block a shard must start and end on a multiple of 128, or the squares of the shards are
    not the squares of the whole.

    Raises:
        ConfigError: the weight has inf or nan, on every rank of ``input_group`` alike; or the
            scheme cannot split it. The caller adds the tensor's name.
    """
    rules = scheme_named(scheme)
    if weight.ndim != 2:
        raise ConfigError(
            f"cannot quantize a weight of shape {tuple(weight.shape)}: it must be [out, in]"
        )
    weight = weight.detach()
    if rules.block is None and has_kernels_for(weight):
        values, scale = _quantize_fused(weight, rules, input_group, rounding)
        quantized = QuantizedWeight(values if out is None else out.copy_(values), scale)
        return _without_inf_and_nan(quantized) if check else quantized
    shared = None
    if input_group is not None and dist.get_world_size(input_group) > 1:
        if rules.block is None:
            shared = _shared_amax(weight, input_group)
        elif weight.shape[1] % rules.block:
            raise ConfigError(
                f"{scheme} cannot split the input dimension into shards of {weight.shape[1]} "
                f"columns: not a multiple of {rules.block}; use fp8, or fewer tensor-parallel ranks"
            )
    if out is None:
        out = torch.empty(weight.shape, dtype=rules.dtype, device=weight.device)
    scale = torch.ones(scale_grid(weight.shape, rules.block), device=weight.device)
    height, width, across = _square(weight.shape, rules.block)
    step = _rows_of_squares(weight, rules.block, on_cpu=_SCRATCH_CPU, on_gpu=_SCRATCH)
    scratch = torch.empty(step, height, across, width, device=weight.device)
    round_ = _rounder(rounding, rules, scratch, weight.shape[1])
    for rows, squares, run in _runs(weight, rules.block):
        amax = _amax(run) if shared is None else shared[squares]
        scale[squares] = scale_of(amax, rules)
        _encode(run, scale[squares], out[rows], scratch, round_, rows.start)
    quantized = QuantizedWeight(out, scale, rules.block)
    return _without_inf_and_nan(quantized) if check else quantized


def dequantize(quantized: QuantizedWeight) -> Tensor:
    """Return ``values * scale`` in float32, [O, I]."""
    values, scale, block = quantized.values, quantized.scale, quantized.block
    if block is not None:
        height, width = values.shape
        scale = scale.repeat_interleave(block, dim=1)[:, :width]
        scale = scale.repeat_interleave(block, dim=0)[:height]
    return values.float().mul_(scale)


def _rounder(
    rounding: Rounding | None, rules: Scheme, scratch_rhCw: Tensor, columns: int
) -> Callable[[Tensor, int], Tensor]:
    if rounding is None:
        return lambda quotients, _: round_to_grid_(quotients, rules)
    rows = scratch_rhCw.shape[:2].numel()
    return Draws(rounding, rules, rows, columns, scratch_rhCw.device).round_


def _quantize_fused(
    weight_OI: Tensor,
    rules: Scheme,
    input_group: dist.ProcessGroup | None,
    rounding: Rounding | None,
) -> tuple[Tensor, Tensor]:
    """Return codes and scales by the kernels for GPUs; scales are inf or nan where weights are."""
    from qurl_megatron.quant import fused_channels as channels  # imports triton

    alone = input_group is None or dist.get_world_size(input_group) == 1
    if alone and weight_OI.shape[1] <= channels.HELD:
        return channels.round_rows(weight_OI, None, rules.dtype, rules.largest, rounding)
    amax_O1 = channels.amax_rows(weight_OI)
    if not alone:
        amax_O1 = torch.where(amax_O1.isfinite(), amax_O1, torch.inf)
        dist.all_reduce(amax_O1, op=dist.ReduceOp.MAX, group=input_group)
    scale_O1 = scale_of(amax_O1, rules)
    return channels.round_rows(weight_OI, scale_O1, rules.dtype, rules.largest, rounding)


def _without_inf_and_nan(quantized: QuantizedWeight) -> QuantizedWeight:
    if not bool(quantized.scale.isfinite().all()):
        raise ConfigError(
            f"cannot quantize a weight of shape {tuple(quantized.values.shape)} that has inf or nan"
        )
    return quantized


def _shared_amax(weight_OI: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the largest magnitude of each channel over all ranks' columns, float32 [O, 1]."""
    amax = torch.zeros(len(weight_OI), 1, device=weight_OI.device)
    for _, squares, run in _runs(weight_OI, None):
        amax[squares] = _amax(run)
    # A MAX over ranks may drop a nan, then one rank would stop and the others go on.
    amax = torch.where(amax.isfinite(), amax, torch.inf)
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


def _amax(run_RhCw: Tensor) -> Tensor:
    """Return the largest magnitude of each square, [R, C]; nan where a square has one."""
    # Two passes that write nothing; torch.aminmax takes several times as long along a dimension.
    low, high = run_RhCw.amin(dim=3), run_RhCw.amax(dim=3)
    return torch.maximum(-low, high).amax(dim=1)


def _encode(
    run_RhCw: Tensor,
    scale_RC: Tensor,
    values: Tensor,
    scratch_rhCw: Tensor,
    round_: Callable[[Tensor, int], Tensor],
    first: int,
) -> None:
    """Write the codes of a run of squares into its ``values``, which have no padding.

    Args:
        round_: brings quotients of a row, and of the rows after it, onto the grid in place.
        first: the row that the run begins with.

    The loop is lean on purpose: at this size a slice costs as much as a tenth of an operator.
    """
    step, height = scratch_rhCw.shape[:2]
    unpadded = scratch_rhCw.view(step * height, -1)[:, : values.shape[1]]
    for squares, scale, codes in zip(
        run_RhCw.split(step),
        scale_RC[:, None, :, None].split(step),
        values.split(step * height),
        strict=True,
    ):
        if len(squares) < step:
            scratch_rhCw = scratch_rhCw[: len(squares)]
        if len(codes) < len(unpadded):
            unpadded = unpadded[: len(codes)]
        torch.div(squares, scale, out=scratch_rhCw)
        codes.copy_(round_(unpadded, first))
        first += len(codes)


def _square(shape: Sequence[int], block: int | None) -> tuple[int, int, int]:
    """Return height and width of a square, and how many lie across."""
    rows, columns = shape
    if block is None:
        return 1, columns, 1
    return block, block, scale_grid(shape, block)[1]


def _rows_of_squares(weight_OI: Tensor, block: int | None, *, on_cpu: int, on_gpu: int) -> int:
    """Return how many rows of squares make up so many elements; at least one, at most all."""
    height, width, across = _square(weight_OI.shape, block)
    elements = on_cpu if weight_OI.device.type == "cpu" else on_gpu
    down, _ = scale_grid(weight_OI.shape, block)
    return min(max(elements // max(height * across * width, 1), 1), down)


def _runs(weight_OI: Tensor, block: int | None) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield a weight as float32 squares [R, h, C, w], some rows of squares at a time.

    Yields:
        The run's rows, its rows of squares, and the squares: a view where the weight is float32
        and full of them, else a buffer that the next run overwrites, padded with zeros.
    """
    O, I = weight_OI.shape  # noqa: E741
    if weight_OI.numel() == 0:
        return
    height, width, across = _square(weight_OI.shape, block)
    down, _ = scale_grid(weight_OI.shape, block)
    step = _rows_of_squares(weight_OI, block, on_cpu=_RUN_CPU, on_gpu=_RUN)
    buffer = None
    if weight_OI.dtype != torch.float32 or O % height or I % width:
        buffer = torch.zeros(step * height, across * width, device=weight_OI.device)
    for first in range(0, down, step):
        last = min(first + step, down)
        rows = slice(first * height, min(last * height, O))
        run = weight_OI[rows]
        if buffer is not None:
            buffer[: len(run), :I] = run
            buffer[len(run) :] = 0  # left by the run before
            run = buffer[: (last - first) * height]
        yield rows, slice(first, last), run.view(last - first, height, across, width)
