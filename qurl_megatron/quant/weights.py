"""Weights on the rollout model's grid, so that shards quantize to the shards of the whole.

Shapes: O = output channels, I = input channels; lower case = this rank's slice. For fp8_block,
R x C = squares of 128 x 128 that share a scale.

On a GPU with Triton, ``fused.channels`` computes the same codes and scales in one pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from qurl_megatron.errors import ConfigError
from qurl_megatron.fused import has_kernels_for
from qurl_megatron.quant.formats import Scheme, round_to_grid_, scale_of, scheme_named

# Float32 elements that are in flight at once, however large the weight: 32 MB on a GPU, and what
# stays in the caches of a CPU from one pass to the next.
_CHUNK = 8 << 20
_CHUNK_CPU = 1 << 17


@dataclass(frozen=True)
class QuantizedWeight:
    """``values * scale`` is the weight; both tensors are what the engines load."""

    values: Tensor  # [O, I] int8 or float8_e4m3fn
    scale: Tensor  # float32 [O, 1], or [ceil(O / block), ceil(I / block)]
    block: int | None = None  # edge of the squares that share a scale; None: a scale per row

    @property
    def scale_name(self) -> str:
        """Suffix of the scale in an exported checkpoint, beside ``weight`` for the values."""
        return "weight_scale" if self.block is None else "weight_scale_inv"


def quantize(
    weight: Tensor, scheme: str, *, input_group: dist.ProcessGroup | None = None
) -> QuantizedWeight:
    """The point of the scheme's grid that is nearest to a weight.

    Args:
        weight: [O, I] in any float format, whole or one tensor-parallel shard; not modified.
        scheme: "int8", "fp8" or "fp8_block"; "int4", "int5" and "int6" are simulated in int8.
        input_group: group over which the input dimension is split (row-parallel layers); its ranks
            agree on one scale per channel. None for whole and column-parallel weights.

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
        values, scale = _quantize_fused(weight, rules, input_group)
        _refuse_inf_and_nan(scale, weight)
        return QuantizedWeight(values, scale)
    amax = _row_amax(weight) if rules.block is None else _block_amax(weight, rules.block)
    # A MAX over ranks may drop a nan, then one rank would stop and the others go on.
    amax = torch.where(amax.isfinite(), amax, torch.inf)
    if input_group is not None and dist.get_world_size(input_group) > 1:
        if rules.block is None:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=input_group)
        elif weight.shape[1] % rules.block:
            raise ConfigError(
                f"{scheme} cannot split the input dimension into shards of {weight.shape[1]} "
                f"columns: not a multiple of {rules.block}; use fp8, or fewer tensor-parallel ranks"
            )
    _refuse_inf_and_nan(amax, weight)

    scale = scale_of(amax, rules)
    values = torch.empty(weight.shape, dtype=rules.dtype, device=weight.device)
    for rows, chunk in _float_chunks(weight, rules.block):
        torch.div(weight[rows], _spread(scale, rows, weight.shape, rules.block), out=chunk)
        values[rows].copy_(round_to_grid_(chunk, rules))
    return QuantizedWeight(values, scale, rules.block)


def dequantize(quantized: QuantizedWeight) -> Tensor:
    """``values * scale`` in float32, [O, I]."""
    values, scale = quantized.values, quantized.scale
    everything = slice(0, len(values))
    return values.float().mul_(_spread(scale, everything, values.shape, quantized.block))


def _quantize_fused(
    weight_OI: Tensor, rules: Scheme, input_group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Codes and scales by the kernels for GPUs; scales are inf or nan where the weight is."""
    from qurl_megatron.fused import channels  # imports triton

    alone = input_group is None or dist.get_world_size(input_group) == 1
    if alone and weight_OI.shape[1] <= channels.HELD:
        return channels.quantize_rows(weight_OI, rules.dtype, rules.largest)
    amax_O1 = channels.amax_rows(weight_OI)
    if not alone:
        amax_O1 = torch.where(amax_O1.isfinite(), amax_O1, torch.inf)
        dist.all_reduce(amax_O1, op=dist.ReduceOp.MAX, group=input_group)
    scale_O1 = scale_of(amax_O1, rules)
    return channels.round_rows(weight_OI, scale_O1, rules.dtype, rules.largest), scale_O1


def _refuse_inf_and_nan(found: Tensor, weight: Tensor) -> None:
    if not bool(found.isfinite().all()):
        raise ConfigError(
            f"cannot quantize a weight of shape {tuple(weight.shape)} that has inf or nan"
        )


def _row_amax(weight_OI: Tensor) -> Tensor:
    """Largest magnitude of each output channel, float32 [O, 1]; nan where a channel has one."""
    if weight_OI.shape[1] == 0:
        return torch.zeros(len(weight_OI), 1, device=weight_OI.device)
    # The extremes are exact in the weight's own format, and need no copy of |weight|. Two passes:
    # torch.aminmax along a dimension takes two to four times as long as both together on a CPU.
    low_O, high_O = weight_OI.amin(dim=1), weight_OI.amax(dim=1)
    return torch.maximum(-low_O, high_O).float()[:, None]


def _block_amax(weight_OI: Tensor, block: int) -> Tensor:
    """Largest magnitude of each square, float32 [R, C]."""
    squares = [-(-size // block) for size in weight_OI.shape]
    amax_RC = torch.zeros(squares, device=weight_OI.device)
    for rows, chunk in _float_chunks(weight_OI, block):
        height, width = (-size % block for size in chunk.shape)
        padded = F.pad(chunk.copy_(weight_OI[rows]).abs_(), (0, width, 0, height))
        first = rows.start // block
        tiles = padded.view(-1, block, squares[1], block)
        amax_RC[first : first + len(tiles)] = tiles.amax(dim=(1, 3))
    return amax_RC


def _float_chunks(weight_OI: Tensor, block: int | None) -> Iterator[tuple[slice, Tensor]]:
    """Slices of rows, with a float32 buffer of their shape; whole squares where there are any."""
    O, I = weight_OI.shape  # noqa: E741
    if weight_OI.numel() == 0:
        return
    unit = block or 1
    chunk = min(_CHUNK, _CHUNK_CPU) if weight_OI.device.type == "cpu" else _CHUNK
    step = min(max(chunk // (I * unit), 1) * unit, O)
    buffer = torch.empty(step, I, device=weight_OI.device)
    for start in range(0, O, step):
        stop = min(start + step, O)
        yield slice(start, stop), buffer[: stop - start]


def _spread(scale: Tensor, rows: slice, shape: torch.Size, block: int | None) -> Tensor:
    """The scales of some rows, ready to broadcast over them: [rows, 1] or [rows, I]."""
    if block is None:
        return scale[rows]
    needed = scale[rows.start // block : -(-rows.stop // block)]
    height = rows.stop - rows.start
    wide = needed.repeat_interleave(block, dim=1)[:, : shape[1]]
    return wide.repeat_interleave(block, dim=0)[:height]
