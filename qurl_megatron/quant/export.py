"""The layouts in which a quantized checkpoint is written, one per family of loaders.

Each stores a weight's values under the weight's own name, [O, I], and a float32 scale beside it
that multiplies them. They differ in the scale's name, and in ``config.json``.

Shapes: O = output channels, I = input channels.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.quant.weights import QuantizedWeight, scale_grid
from qurl_megatron.schemes import BLOCK, EXPORTED, SCHEMES


@dataclass(frozen=True)
class ExportLayout:
    """How one family of loaders wants one scheme."""

    config: dict  # ``quantization_config`` of config.json, without the modules left as they were
    scale: str = "weight_scale"  # stands in the place of ``weight`` in the name of the scale
    ignore_key: str = "ignore"  # where the modules left as they were are listed


def _compressed(number: str, weights: dict, activations: dict) -> dict:
    """compressed-tensors' config of one group: W8A8, activations quantized on the fly."""
    common = {"num_bits": 8, "type": number, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{number}-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**common, "dynamic": False, **weights},
                "input_activations": {**common, "dynamic": True, **activations},
            }
        },
    }


_BY_CHANNEL = ({"strategy": "channel"}, {"strategy": "token"})
_BY_BLOCK = (
    {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
    {"strategy": "group", "group_size": BLOCK},
)
_BLOCK_CONFIG = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}

# format -> scheme -> layout.
FORMATS: dict[str, dict[str, ExportLayout]] = {
    # SGLang, vLLM and transformers.
    "compressed-tensors": {
        "int8": ExportLayout(_compressed("int", *_BY_CHANNEL)),
        "fp8": ExportLayout(_compressed("float", *_BY_CHANNEL)),
        "fp8_block": ExportLayout(_compressed("float", *_BY_BLOCK)),
    },
    # SGLang's own loaders; vLLM and transformers read the fp8_block one too.
    "sglang": {
        "int8": ExportLayout({"quant_method": "w8a8_int8"}),
        "fp8": ExportLayout({"quant_method": "w8a8_fp8"}),
        "fp8_block": ExportLayout(_BLOCK_CONFIG, "weight_scale_inv", "modules_to_not_convert"),
    },
}

# Keys of a found config that may differ and the tensors still mean the same.
_INCIDENTAL = {"targets", "quantization_status"}


def layout(scheme: str, fmt: str) -> ExportLayout:
    """Return the layout of a scheme in a format.

    Raises:
        ConfigError: either name is unknown.
    """
    if fmt not in FORMATS:
        raise ConfigError(f"unknown checkpoint format {fmt!r}; known are {sorted(FORMATS)}")
    if scheme not in EXPORTED:
        raise ConfigError(f"unknown quantization scheme {scheme!r}; known are {sorted(EXPORTED)}")
    return FORMATS[fmt][scheme]


def scale_name(name: str, scheme: str, fmt: str) -> str:
    """Return the name of the tensor that holds the scale of the weight ``name`` (``X.weight``)."""
    assert name.endswith(".weight"), name
    return name.removesuffix("weight") + layout(scheme, fmt).scale


def stored_shapes(
    name: str, shape: Sequence[int], scheme: str, fmt: str
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of each tensor that stands for a weight [O, I].

    Raises:
        ConfigError: no engine could run the weight; names it.
    """
    block = SCHEMES[scheme].block
    if block is not None and any(size % block for size in shape):
        # Activations are quantized in whole groups of 128, fused q/k/v and gate/up are whole
        # squares: vLLM, SGLang and compressed-tensors all stop at such a weight, at load or later.
        raise ConfigError(
            f"engines run {scheme} weights only if both sizes are multiples of {block}, {name} is "
            f"{list(shape)}; use scheme fp8"
        )
    scale_shape = scale_grid(shape, block)
    return {
        name: (tuple(shape), SCHEMES[scheme].dtype),
        scale_name(name, scheme, fmt): (scale_shape, torch.float32),
    }


def stored(name: str, quantized: QuantizedWeight, fmt: str) -> dict[str, Tensor]:
    """Return the tensors that stand for a weight, as ``stored_shapes`` announces them."""
    return {name: quantized.values, scale_name(name, scheme_of(quantized), fmt): quantized.scale}


def loaded(name: str, tensors: Mapping[str, Tensor], scheme: str, fmt: str) -> QuantizedWeight:
    """Undo ``stored``.

    Other writers store scales in BF16, or without the dimensions of size 1; both are read.

    Raises:
        ConfigError: a tensor is missing, or does not fit the layout; names it.
    """
    rules = SCHEMES[scheme]
    for part in (name, scale_name(name, scheme, fmt)):
        if part not in tensors:
            raise ConfigError(f"{part} is missing from a checkpoint of {scheme} in format {fmt}")
    values, scale = (tensors[part] for part in (name, scale_name(name, scheme, fmt)))
    if values.dtype != rules.dtype or values.ndim != 2:
        raise ConfigError(
            f"{name} is {values.dtype} {list(values.shape)}, {scheme} weights are {rules.dtype} "
            "[out, in]"
        )
    shape = scale_grid(values.shape, rules.block)
    if not scale.is_floating_point() or _long_sizes(scale.shape) != _long_sizes(shape):
        raise ConfigError(
            f"{scale_name(name, scheme, fmt)} is {scale.dtype} {list(scale.shape)}, the scale of "
            f"{name} {list(values.shape)} must be torch.float32 {list(shape)}"
        )
    return QuantizedWeight(values, scale.float().reshape(shape), rules.block)


def _long_sizes(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def scheme_of(quantized: QuantizedWeight) -> str:
    """Return the scheme that a weight was quantized with."""
    kind = (quantized.values.dtype, quantized.block)
    return next(name for name in EXPORTED if (SCHEMES[name].dtype, SCHEMES[name].block) == kind)


def quantization_config(scheme: str, fmt: str, ignore: Sequence[str]) -> dict:
    """Return the entry ``quantization_config`` of config.json.

    Args:
        ignore: linear modules that stay in high precision (``lm_head``, MoE routers), named as in
            the checkpoint. SGLang's w8a8_fp8 reads no list, and skips just these.
    """
    want = layout(scheme, fmt)
    return {**copy.deepcopy(want.config), want.ignore_key: list(ignore)}


def read_quantization(config: Mapping) -> tuple[str, str] | None:
    """(scheme, format) of the checkpoint that a config.json describes; None: it is not quantized.

    Other tools' files in the same layout are recognised, too.

    Raises:
        ConfigError: it is quantized in a way that this package does not read.
    """
    stated = config.get("quantization_config")
    if not stated:
        return None
    if not isinstance(stated, dict):
        raise ConfigError(f"config.json: quantization_config must be an object, got {stated!r:.80}")
    for fmt, layouts in FORMATS.items():
        for scheme, want in layouts.items():
            if _agrees(want.config, stated):
                return scheme, fmt
    method = stated.get("quant_algo") or stated.get("format") or stated.get("quant_method")
    raise ConfigError(
        f"config.json: quantization_config ({method}) is not a layout this package reads; it reads "
        "W8A8 with dynamic activations: int8 or FP8 per channel, FP8 in blocks of 128 x 128"
    )


def _agrees(expected: object, found: object) -> bool:
    """True if ``found`` says all that ``expected`` says; it may say more."""
    if isinstance(expected, dict):
        if not isinstance(found, dict):
            return False
        groups = expected.get("config_groups")
        if groups is not None:
            named = found.get("config_groups")  # whatever their names
            other_groups = list(named.values()) if isinstance(named, dict) else []
            if len(other_groups) != 1 or not _agrees(*groups.values(), *other_groups):
                return False  # mixed precision, or another
        compared_keys = expected.keys() - _INCIDENTAL - {"config_groups"}
        return all(key in found and _agrees(expected[key], found[key]) for key in compared_keys)
    if isinstance(expected, str):
        return isinstance(found, str) and found.lower() == expected.lower()
    return found == expected
