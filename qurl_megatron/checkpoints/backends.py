"""Programs that round a weight to the grid: this package, ModelOpt or Transformer Engine.

All three give the same format. ``modelopt`` also gives the same bits; it is there to be compared
with. ``te`` multiplies by reciprocals where the others divide, so a scale may differ in its last
bits, and the code of a weight that lies between two codes. The packages are imported when they are
asked for.
"""

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.quant import QuantizedWeight, quantize
from qurl_megatron.schemes import BLOCK, SCHEMES, scale_grid

# TensorQuantizer's settings; {-1: n, -2: n} are squares of n x n.
_MODELOPT: dict[str, dict[str, Any]] = {
    "int8": {"num_bits": 8, "axis": 0},
    "fp8": {"num_bits": (4, 3), "axis": 0},
    "fp8_block": {"num_bits": (4, 3), "block_sizes": {-1: BLOCK, -2: BLOCK}},
}


def by_modelopt(weight: Tensor, scheme: str) -> QuantizedWeight:
    """Quantize as ModelOpt does: a quantizer collects amax, the exporter makes scale and codes.

    Only weights whose largest magnitude in a channel is under 1e-35 differ from ``native``, which
    writes those as 0.
    """
    with warnings.catch_warnings():
        # Its import warns of versions; zero channels make it ask for more calibration data.
        warnings.simplefilter("ignore")
        from modelopt.torch.export import quant_utils
        from modelopt.torch.quantization.config import QuantizerAttributeConfig
        from modelopt.torch.quantization.nn import TensorQuantizer

        weight = weight.detach()
        quantizer = TensorQuantizer(QuantizerAttributeConfig(**_MODELOPT[scheme]))
        quantizer.disable_quant()
        quantizer.enable_calib()
        quantizer(weight)
        quantizer.load_calib_amax()
        scale = quant_utils.get_scaling_factor(quantizer)
        kind = {
            "int8": quant_utils.QUANTIZATION_INT8_SQ,
            "fp8": quant_utils.QUANTIZATION_FP8_PC_PT,
            "fp8_block": quant_utils.QUANTIZATION_FP8_PB_WO,
        }[scheme]
        block = SCHEMES[scheme].block
        if block is None:
            scale = scale.reshape(-1)  # of a single channel it made a scalar, and cannot use it
        values = quant_utils.to_quantized_weight(weight, scale, kind, block_size=block)
    return QuantizedWeight(values, scale.reshape(scale_grid(weight.shape, block)), block)


def by_te(weight: Tensor, scheme: str) -> QuantizedWeight:
    """Cast by blocks with Transformer Engine, on the current GPU; return to the weight's device.

    It quantizes whole squares only, so the weight is padded with zeros and the result cropped.
    """
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    quantizer = Float8BlockQuantizer(
        tex.DType.kFloat8E4M3,
        rowwise=True,
        columnwise=False,
        amax_epsilon=0.0,
        force_pow_2_scales=False,
        block_scaling_dim=2,
    )
    height, width = (-size % BLOCK for size in weight.shape)
    cast = quantizer(F.pad(weight.detach().cuda(), (0, width, 0, height)))
    return cropped(cast._rowwise_data, cast._rowwise_scale_inv, weight.shape, weight.device)


def cropped(
    codes: Tensor, scale: Tensor, shape: torch.Size, device: torch.device
) -> QuantizedWeight:
    """Return Transformer Engine's codes and scales of a weight [O, I], cut to its size.

    Args:
        codes: uint8 [O, I], each size rounded up to a multiple of 128; the bytes are E4M3.
        scale: float32 [ceil(O / 128), ceil(I / 128)], the second size rounded up to a multiple of
            4 for its matrix products; the excess is not initialised.
    """
    rows, columns = shape
    down, across = scale_grid(shape, BLOCK)
    values, scale = codes.view(torch.float8_e4m3fn)[:rows, :columns], scale[:down, :across]
    return QuantizedWeight(
        values.to(device).contiguous(), scale.to(device).contiguous(), block=BLOCK
    )


BACKENDS: dict[str, Callable[[Tensor, str], QuantizedWeight]] = {
    "native": quantize,
    "modelopt": by_modelopt,
    "te": by_te,
}


def check_backend(backend: str, scheme: str) -> None:
    """Check, before a long conversion, that a backend can do a scheme on this machine.

    Raises:
        ConfigError: it makes no such scheme, or a package or device is missing.
    """
    if backend == "modelopt" and importlib.util.find_spec("modelopt") is None:
        raise ConfigError(
            "backend modelopt needs the package nvidia-modelopt: pip install "
            "'qurl-megatron[modelopt]', or use backend native"
        )
    if backend != "te":
        return
    if scheme != "fp8_block":
        raise ConfigError(
            f"backend te casts fp8_block alone, not {scheme}; use backend native or modelopt"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            "backend te needs the package transformer-engine: pip install 'qurl-megatron[gpu]' on "
            "a machine with CUDA, or use backend native"
        )
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        raise ConfigError(
            "backend te needs a GPU of compute capability 9.0 (Hopper) or newer, and there is "
            "none; use backend native"
        )
