"""W8A8 layers in plain torch, which SGLang 0.5.23 lacks on a machine without a GPU.

SGLang's own CPU backend wants ``sgl_kernel`` built for AMX. Without that it runs on plain torch,
once five gaps are filled:

    sgl_kernel     imported everywhere; here a stub, whose functions fail when they are called
    torchvision    imported for images; PyPI's wheel expects two operators of the CUDA build
    W8A8 layers    w8a8_int8, w8a8_fp8 and compressed-tensors with a scale per channel, as
                   ``engines.embedded.decoder``: INT8 products are exact, FP8 is emulated in FP32
    experts        of w8a8_int8 and w8a8_fp8, and unquantized ones split over ranks, one by one
    shared expert  whose gated output a Triton kernel adds

In addition, a paused scheduler sleeps instead of spinning, and flushing the cache does not walk
over all of Python's objects, because the trainer computes on the same cores.

``install`` and ``register`` do nothing unless ``SGLANG_USE_CPU_ENGINE=1`` and there is no CUDA.

Limits: no experts of compressed-tensors; no speculative decoding, LoRA, quantized KV cache,
grammars or images; FP8 multiplies in FP32, so it shows what FP8 does to a model, not how fast it
is; no scales per tensor or block, and no static activation scales; attention is torch's, which
takes the sequences of a batch one after another.
"""

import functools
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from qurl_megatron.engines.embedded.decoder import Matrix

_libraries: list = []  # an operator lives as long as its library


def wanted() -> bool:
    """Return whether SGLang is asked to run without a GPU, and there is none."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" and not torch.cuda.is_available()


def registered() -> bool:
    """Return whether ``register`` has been called in this process, and had something to do."""
    module = sys.modules.get("sglang.srt.layers.quantization.w8a8_int8")
    return module is not None and module.W8A8Int8LinearMethod.apply is _apply


def install() -> None:
    """Fill the gaps that SGLang's imports need; call it before them, in each of its processes."""
    if not wanted():
        return
    # Otherwise a helper of the embedding is compiled, with a C++ compiler, for half a minute.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if "sgl_kernel" not in sys.modules:
        sys.modules["sgl_kernel"] = _Stub("sgl_kernel")
    _define_operators()


def register() -> None:
    """Put the W8A8 layers in; SGLang's plugin entry point (``sglang.srt.plugins``)."""
    if not wanted():
        return
    install()
    import sglang.srt.configs.update_config  # noqa: F401
    from sglang.kernels.ops.elementwise import elementwise
    from sglang.srt.layers.quantization import unquant, w8a8_fp8, w8a8_int8
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors
    from sglang.srt.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w8a8_fp8,
        compressed_tensors_w8a8_int8,
    )
    from sglang.srt.mem_cache.pool_host import common as pool_host
    from sglang.srt.platforms import cpu as cpu_platform

    w8a8_int8.W8A8Int8LinearMethod.process_weights_after_loading = _transpose
    w8a8_int8.W8A8Int8LinearMethod.apply = _apply
    w8a8_fp8.W8A8Fp8LinearMethod.apply = _apply
    unquant.UnquantizedFusedMoEMethod.apply = _apply_experts
    w8a8_int8.W8A8Int8MoEMethod.apply = _apply_experts
    w8a8_fp8.W8A8FP8MoEMethod.apply = _apply_experts
    elementwise.fused_gate_sigmoid_mul_add = _add_gated
    compressed_tensors_w8a8_int8.CompressedTensorsW8A8Int8.apply_weights = _apply
    compressed_tensors_w8a8_fp8.CompressedTensorsW8A8Fp8.apply_weights = _apply

    for module in ("sglang.srt.configs.update_config", "sglang.srt.model_executor.model_runner"):
        if module in sys.modules:
            sys.modules[module].adjust_config_with_unaligned_cpu_tp = _as_on_gpus

    # SGLang empties the device's cache with every flush: here a walk over all of Python's objects,
    # a third of a second on each rank, that finds nothing.
    cpu_platform.CpuDeviceMixin.empty_cache = lambda self: None
    scheduler = sys.modules.get("sglang.srt.managers.scheduler")
    if scheduler is not None:  # in the processes that have one
        record = scheduler.Scheduler._record_scheduler_state_for_paused_engine
        if not hasattr(record, "__wrapped__"):
            scheduler.Scheduler._record_scheduler_state_for_paused_engine = _then_sleep(record)

    # Host memory for tokens' experts, which SGLang would pin for a GPU.
    pool_host.ALLOC_MEMORY_FUNCS["cpu"] = lambda shape, *, dtype, **_: torch.empty(
        shape, dtype=dtype
    )
    config = compressed_tensors.CompressedTensorsConfig
    config._check_scheme_supported = _up_to_hopper
    # FP32 activations make exact comparisons possible.
    dtypes = [torch.float16, torch.bfloat16, torch.float32]
    for each in (config, w8a8_int8.W8A8Int8Config, w8a8_fp8.W8A8Fp8Config):
        each.get_supported_act_dtypes = classmethod(lambda cls: dtypes)


def _define_operators() -> None:
    """Define the operators that torchvision's wheel looks up, once, unless torch has CUDA."""
    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


class _Stub(types.ModuleType):
    """A module that has every name, as a function that fails when it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "Stand-in for kernels that exist for GPUs only.")
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: object, **kwargs: object) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} needs a GPU")

        return missing


def _transpose(self, layer: Any) -> None:
    """Transpose as SGLang does on GPUs; on CPU it would demand AMX."""
    layer.weight = nn.Parameter(layer.weight.data.t(), requires_grad=False)
    layer.weight_scale = nn.Parameter(layer.weight_scale.data, requires_grad=False)


def _apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    x_TI, weight_OI, scale_O = x.flatten(0, -2), layer.weight.t(), layer.weight_scale.view(-1)
    if len(scale_O) != len(weight_OI):
        raise NotImplementedError("without a GPU there are W8A8 layers with a scale per channel")
    scheme = "int8" if weight_OI.dtype is torch.int8 else "fp8"
    y_TO = Matrix(scheme, weight_OI, scale_O)(x_TI, bias)
    return y_TO.view(*x.shape[:-1], len(weight_OI))


def _apply_experts(self, layer: Any, dispatch_output: Any) -> Any:
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    weights_TK, experts_TK, _ = dispatch_output.topk_output
    y_TH = _experts(layer, dispatch_output.hidden_states, weights_TK, experts_TK)
    return StandardCombineInput(hidden_states=y_TH)


def _add_gated(x_TH: Tensor, gate_H: Tensor, shared_TH: Tensor, total_TH: Tensor) -> None:
    total_TH += (x_TH @ gate_H).sigmoid()[:, None] * shared_TH


def _experts(layer: Any, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, [T, H]; -1 is an expert of another rank."""
    schemes = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
    scheme = schemes.get(layer.w13_weight.dtype, "none")

    def matrix(kind: str, expert: int) -> Matrix:
        weight_OI, scale_O = getattr(layer, kind)[expert], None
        if scheme != "none":
            scale_O = getattr(layer, f"{kind}_scale")[expert].view(-1)
        return Matrix(scheme, weight_OI, scale_O)

    y_TH = torch.zeros(x_TH.shape, dtype=torch.float32)
    for expert in experts_TK[experts_TK >= 0].unique().tolist():
        tokens, choices = (experts_TK == expert).nonzero(as_tuple=True)
        gate, up = matrix("w13_weight", expert)(x_TH[tokens]).chunk(2, dim=-1)
        y = matrix("w2_weight", expert)(silu(gate) * up)
        y_TH.index_add_(0, tokens, y.float() * weights_TK[tokens, choices, None])
    return y_TH.to(x_TH.dtype)


def _then_sleep(record: Callable[[Any], None]) -> Callable[[Any], None]:
    """Have SGLang's paused loop sleep until the next request, as it does when idle.

    It would spin on the cores with which the trainer quantizes. Its other ranks wait for it.
    """

    @functools.wraps(record)
    def record_and_sleep(scheduler: Any) -> None:
        record(scheduler)
        scheduler.maybe_sleep_on_idle()

    return record_and_sleep


def _as_on_gpus(model_config: object, load_config: object, tp_size: int) -> object:
    """Split and copy heads and MLPs as on GPUs, where SGLang would pad them for AMX's tiles."""
    return model_config


def _up_to_hopper(self, min_capability: int, error: bool = True, **_: object) -> bool:
    """Claim Hopper's compute capability, by which SGLang chooses the scheme."""
    return min_capability <= 90
