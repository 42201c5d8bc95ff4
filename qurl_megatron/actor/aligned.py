"""Linear layers that compute with the engines' numbers: their codes, under their scales.

    y[t, o] = (sum_i a[t, i] * w[o, i]) * weight_scale[o] * scale[t] + bias[o]

``w`` are the codes that are published, made of the FP32 masters once per version of the weights.
``a`` are the tokens: codes as of an engine's kernels, or unquantized and without a scale.

Gradients go straight through the rounding, to masters and tokens alike, but are those of the
product that was computed: dX = dY W with the weight on its grid, and dW = dY' X with the tokens on
theirs. So the loss has the slope of the quantized policy, which acts; only the steps of
the rounding itself, whose slope is 0 or infinite, count as if they were not there. Codes are exact
in BF16, so the backward pass multiplies them in the model's own format, and scales go into dY.

Shapes: T tokens (of this rank's part of the sequence, or gathered), I input and O output channels
of this rank's part of a weight.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from qurl_megatron.quant import QuantizedWeight, quantize, quantize_tokens
from qurl_megatron.quant.activations import Arithmetic, magnitudes, scaled_product


@dataclass(frozen=True)
class Align:
    """How the trainer's linear layers follow the engines'."""

    scheme: str
    activations: bool = False  # tokens are quantized as well
    arithmetic: Arithmetic = "exact"
    engine_tensor: int = 1  # over how many ranks an engine splits a layer; divides the trainer's


class Aligned:
    """Gives a Megatron layer codes to multiply by, while there are some."""

    split_inputs: bool  # over tensor ranks
    tp_group: dist.ProcessGroup  # Megatron's, as is the weight
    weight: nn.Parameter

    def __init__(self, *arguments: Any, align: Align, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.align = align
        self.quantized: QuantizedWeight | None = None

    def take(self, master_OI: Tensor) -> None:
        """Make the codes of an FP32 weight; all tensor ranks together."""
        self.quantized = quantize(
            master_OI,
            self.align.scheme,
            input_group=self.tp_group if self.split_inputs else None,
            out=None if self.quantized is None else self.quantized.values,
        )

    def encode(self, tokens_TI: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the tokens as this layer multiplies them, and their scales, [T, 1]."""
        align = self.align
        if not align.activations:
            return tokens_TI, None
        amax_T1 = magnitudes(tokens_TI)
        if self.split_inputs:
            amax_T1 = as_engines_split(amax_T1, self.tp_group, align.engine_tensor)
        return quantize_tokens(tokens_TI, align.scheme, arithmetic=align.arithmetic, amax=amax_T1)

    def _forward_impl(self, input: Tensor, weight: Tensor, **how: Any) -> Tensor:
        if self.quantized is None:
            # The method of the Megatron layer that comes next in a class's bases.
            plain_forward = super()._forward_impl  # type: ignore[misc]
            return plain_forward(input=input, weight=weight, **how)
        gathers, reduces = how["sequence_parallel"], how["allreduce_dgrad"]
        return _StraightThrough.apply(input, weight, how["bias"], self, gathers, reduces)


class AlignedColumn(Aligned, ColumnParallelLinear):
    """Tensor ranks have different outputs, each with its scale."""

    split_inputs = False


class AlignedRow(Aligned, RowParallelLinear):
    """Tensor ranks have different inputs of all outputs: they agree on the weights' scales.

    They also agree on the scales of tokens, as far as one engine rank has the parts of several.
    """

    split_inputs = True


def as_engines_split(amax_T1: Tensor, group: dist.ProcessGroup, engine_tensor: int) -> Tensor:
    """Return the largest magnitudes of tokens over the part that one engine rank has.

    Args:
        amax_T1: of this rank's part.
        group: the ranks that split the tokens' features, in order; a multiple of
            ``engine_tensor``, so that each has a part of one engine rank's.
    """
    size = group.size()
    if size == engine_tensor:
        return amax_T1
    # A MAX over ranks may drop a nan, and then codes that mean nothing would go on. Inf comes out
    # as nan: 0 times inf.
    amax_T1 = torch.where(amax_T1.isfinite(), amax_T1, torch.inf)
    if engine_tensor == 1:
        dist.all_reduce(amax_T1, op=dist.ReduceOp.MAX, group=group)
        return amax_T1
    together = size // engine_tensor
    all_pT1 = _gathered(amax_T1, group).view(engine_tensor, together, *amax_T1.shape)
    return all_pT1[group.rank() // together].amax(dim=0)


def aligned_layers(model: nn.Module) -> list[Aligned]:
    return [module for module in model.modules() if isinstance(module, Aligned)]


@contextmanager
def plain(layers: list[Aligned]) -> Iterator[None]:
    """Inside, the layers compute with their weights as they are."""
    quantized_layers = [layer.quantized for layer in layers]
    for layer in layers:
        layer.quantized = None
    try:
        yield
    finally:
        for layer, quantized in zip(layers, quantized_layers, strict=True):
            layer.quantized = quantized


class _StraightThrough(torch.autograd.Function):
    """The product above, with Megatron's collectives around it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias: Tensor | None,
        layer: Aligned,
        gathers: bool,
        reduces: bool,
    ) -> Tensor:
        """
        Args:
            x: [s, ..., I] of the model's format.
            weight_OI: the weight behind the codes, which gets their gradient.
            layer: has the codes.
            gathers: tokens are split over the tensor ranks, and their codes are gathered.
            reduces: the tensor ranks have parts of the tokens' gradient.
        """
        quantized, ctx.group = layer.quantized, layer.tp_group
        assert quantized is not None
        ctx.gathers, ctx.reduces, ctx.shape = gathers, reduces, x.shape
        a_TI, scale_T1 = layer.encode(x.reshape(-1, x.shape[-1]))
        ctx.save_for_backward(a_TI, scale_T1, quantized.values, quantized.scale)
        if gathers:
            a_TI, scale_T1 = _both_gathered(a_TI, scale_T1, layer.tp_group)
        codes_OI, scale_O = quantized.values, quantized.scale[:, 0]
        if scale_T1 is not None:
            y_TO = scaled_product(a_TI, scale_T1, codes_OI, scale_O, bias, x.dtype)
        else:
            # The scales come after the product: on the weight, BF16 would round codes times scales.
            y_TO = (a_TI @ codes_OI.to(x.dtype).t()).float() * scale_O
            if bias is not None:
                y_TO = y_TO + bias
            y_TO = y_TO.to(x.dtype)
        return y_TO.view(-1, *x.shape[1:-1], y_TO.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        a_TI, scale_T1, w_OI, w_scale_O1 = ctx.saved_tensors
        dtype = dy.dtype
        dy_TO = dy.reshape(-1, dy.shape[-1])
        dx_TI = (dy_TO * w_scale_O1.t()).to(dtype) @ w_OI.to(dtype)
        pending = None  # on its way while the weight's gradient is computed
        if ctx.gathers:
            whole_TI, dx_TI = dx_TI, dx_TI.new_empty(a_TI.shape)
            pending = dist.reduce_scatter_tensor(dx_TI, whole_TI, group=ctx.group, async_op=True)
            a_TI, scale_T1 = _both_gathered(a_TI, scale_T1, ctx.group)
        elif ctx.reduces:
            pending = dist.all_reduce(dx_TI, group=ctx.group, async_op=True)
        dw_OI = db_O = None
        if ctx.needs_input_grad[1]:
            left_TO = dy_TO if scale_T1 is None else (dy_TO * scale_T1).to(dtype)
            dw_OI = left_TO.t() @ a_TI.to(dtype)
        if ctx.needs_input_grad[2]:
            db_O = dy_TO.sum(dim=0)
        if pending is not None:
            pending.wait()
        return dx_TI.view(ctx.shape), dw_OI, db_O, None, None, None


def _both_gathered(
    a_TI: Tensor, scale_T1: Tensor | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor | None]:
    return _gathered(a_TI, group), None if scale_T1 is None else _gathered(scale_T1, group)


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the tensors of all ranks, one behind the other along the first dimension."""
    gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
    as_bytes = x.dtype == torch.float8_e4m3fn  # which collectives do not know
    to, part = (t.view(torch.uint8) if as_bytes else t for t in (gathered, x.contiguous()))
    dist.all_gather_into_tensor(to, part, group=group)
    return gathered
