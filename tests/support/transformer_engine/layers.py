"""Linear layers and norms: parameters, attributes and collectives as Transformer Engine has them.

Shapes: s = this rank's part of the sequence under sequence parallelism, else all of it.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional


class _Stateful(nn.Module):
    """State that every layer of the library has beside its parameters."""

    def get_extra_state(self) -> Tensor:
        """FP8 scales; an empty tensor says that there are none."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or not state.numel(), "only layers without FP8 are here"


class _Module(_Stateful):
    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        self.tp_group = tp_group


class Linear(_Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        ub_name: str | None = None,
        symmetric_ar_type: str | None = None,
    ) -> None:
        super().__init__()
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.parallel_mode = parallel_mode
        self.ub_name = ub_name
        self.tp_size = tp_size if tp_group is None else dist.get_world_size(tp_group)
        self.set_tensor_parallel_group(tp_group)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        parts = {"column": (self.tp_size, 1), "row": (1, self.tp_size)}
        across, along = parts.get(parallel_mode or "", (1, 1))
        assert out_features % across == 0 and in_features % along == 0
        self.out_features, self.in_features = out_features // across, in_features // along
        like: dict[str, Any] = dict(dtype=params_dtype, device=device)
        self._add_norm(like)
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, **like))
        if init_method is not None:
            with torch.no_grad():
                init_method(self.weight)
        # Without a bias it is an empty tensor, which is no parameter.
        self.bias = torch.empty(0, **like)
        if bias:
            del self.bias
            self.bias = nn.Parameter(torch.zeros(self.out_features, **like))
        self._mark()

    def _add_norm(self, like: dict) -> None:
        """A norm's parameters come before the weight."""

    def _mark(self) -> None:
        _mark_split(self.weight, 1 if self.parallel_mode == "row" else 0)
        if self.use_bias and self.parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel
        elif self.use_bias and self.parallel_mode == "column":
            _mark_split(cast(nn.Parameter, self.bias), 0)

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        return self._project(inp, is_first_microbatch)

    def _project(self, x: Tensor, is_first: bool | None) -> Tensor | tuple[Tensor, Tensor]:
        from megatron.core.tensor_parallel import mappings  # not before the stand-in is there

        split = self.tp_size > 1
        if split and self.parallel_mode == "column":
            enter = mappings.copy_to_tensor_model_parallel_region
            if self.sequence_parallel:
                enter = mappings.gather_from_sequence_parallel_region
            x = enter(x, group=self.tp_group)
        if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
            out = _AccumulatingLinear.apply(x, self.weight, bool(is_first))
        else:
            out = functional.linear(x, self.weight)
        if split and self.parallel_mode == "row":
            leave = mappings.reduce_from_tensor_model_parallel_region
            if self.sequence_parallel:
                leave = mappings.reduce_scatter_to_sequence_parallel_region
            out = leave(out, group=self.tp_group)
        if self.return_bias:
            return out, self.bias
        return out + self.bias if self.use_bias else out


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        **linear: Any,
    ) -> None:
        assert normalization == "RMSNorm" and not return_layernorm_output, "not built here"
        self.normalization = normalization
        self._eps, self._zero_centred = eps, zero_centered_gamma
        super().__init__(in_features, out_features, **linear)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma

    def _add_norm(self, like: dict) -> None:
        self.layer_norm_weight = nn.Parameter(_gain(self.in_features, self._zero_centred, like))

    def _mark(self) -> None:
        super()._mark()
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        # The norm sees this rank's part of the sequence; what it gives is gathered.
        x = _norm(inp, self.layer_norm_weight, self.eps, self.zero_centered_gamma)
        return self._project(x, is_first_microbatch)


class GroupedLinear(_Module):
    """Products of runs of rows, each with a weight of its own; experts' tokens in their order."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        ub_name: str | None = None,
    ) -> None:
        super().__init__()
        assert tp_size == 1 and not bias, "Megatron splits experts itself, and none has a bias here"
        self.num_gemms, self.use_bias = num_gemms, bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.fp8, self.fp8_calibration = False, False
        self.fp8_meta = {"fp8_checkpoint": False}
        for index in range(num_gemms):
            like: dict[str, Any] = dict(dtype=params_dtype, device=device)
            weight = nn.Parameter(torch.empty(out_features, in_features, **like))
            _mark_split(weight, 1 if parallel_mode == "row" else 0)
            self.register_parameter(f"weight{index}", weight)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def forward(
        self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> Tensor:
        outs = []
        for index, x in enumerate(inp.split(m_splits)):
            weight = getattr(self, f"weight{index}")
            if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
                outs.append(_AccumulatingLinear.apply(x, weight, bool(is_first_microbatch)))
            else:
                outs.append(functional.linear(x, weight))
        return torch.cat(outs)


class RMSNorm(_Stateful):
    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert (normalized_shape is None) != (hidden_size is None), "one of two names for one size"
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        like = dict(dtype=params_dtype or dtype, device=device)
        self.weight = nn.Parameter(
            _gain(normalized_shape or hidden_size or 0, zero_centered_gamma, like)
        )
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel

    def forward(self, input: Tensor) -> Tensor:
        return _norm(input, self.weight, self.eps, self.zero_centered_gamma)


def _gain(size: int, zero_centred: bool, like: dict) -> Tensor:
    return torch.full((size,), 0.0 if zero_centred else 1.0, **like)


def _norm(x: Tensor, gain: Tensor, eps: float, zero_centred: bool) -> Tensor:
    """In FP32 to the end and rounded once, as the library's kernel does."""
    wide = x.float()
    gain = gain.float() + 1.0 if zero_centred else gain.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain).to(x.dtype)


def _mark_split(parameter: nn.Parameter, dim: int) -> None:
    """The library marks every weight so, one that is not split too."""
    for name in ("tensor_model_parallel", "partition_dim", "partition_stride"):
        assert not hasattr(parameter, name)
    parameter.tensor_model_parallel = True
    parameter.partition_dim, parameter.partition_stride = dim, 1


class _AccumulatingLinear(torch.autograd.Function):
    """Adds the weight's gradient to ``main_grad`` itself; autograd gets something of its shape.

    In the first microbatch of a batch the library writes over what is there.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: nn.Parameter, overwrite: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.overwrite = weight, overwrite
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        total = weight.main_grad
        if ctx.overwrite:
            total.zero_()
        total += grad.flatten(0, -2).to(total.dtype).t() @ x.flatten(0, -2).to(total.dtype)
        weight.grad_added_to_main_grad = True
        # Nobody may read it.
        return grad @ weight.detach(), torch.full_like(weight, float("nan")), None
