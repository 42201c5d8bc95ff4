"""The layouts in which quantized checkpoints are written: compressed-tensors', or DeepSeek's.

SGLang, vLLM and transformers read both. fp8_block is written in DeepSeek's ("fp8"), all else in
compressed-tensors', but SGLang reads no INT8 experts of that on a GPU: a model with these says that
it has SGLang's own W8A8 instead. Each stores a weight's values under the weight's own name, [O, I],
and a float32 scale beside it that multiplies them.

Shapes: O = output channels, I = input channels.
"""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.quant.weights import QuantizedWeight
from qurl_megatron.schemes import BLOCK, SCALES, SCHEMES, scale_grid


def _config(number: str, weights: dict, activations: dict) -> dict:
    """Config of one group: W8A8, activations quantized on the fly."""
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

CONFIGS: dict[str, dict] = {
    "int8": _config("int", *_BY_CHANNEL),
    "fp8": _config("float", *_BY_CHANNEL),
    "fp8_block": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    },
}
"""``quantization_config`` of config.json by scheme, without the modules left as they were."""

INT8_EXPERTS = {"quant_method": "w8a8_int8"}
"""The same of INT8 where a model has experts: SGLang's, the only one of its that serves them."""

COMPRESSED_BLOCKS = _config("float", *_BY_BLOCK)
"""The same of fp8_block where compressed-tensors has written it; it is read alone."""

_READ = (*CONFIGS.items(), ("int8", INT8_EXPERTS), ("fp8_block", COMPRESSED_BLOCKS))

# Keys of a config that may differ without changing the meaning of the tensors.
_INCIDENTAL = {"targets", "quantization_status", "fmt"}


def stored_shapes(
    name: str, shape: Sequence[int], scheme: str
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
        name + SCHEMES[scheme].scale: (scale_shape, torch.float32),
    }


def stored(name: str, quantized: QuantizedWeight, scheme: str) -> dict[str, Tensor]:
    """Return the tensors that stand for a weight, as ``stored_shapes`` announces them."""
    return {name: quantized.values, name + SCHEMES[scheme].scale: quantized.scale}


def loaded(name: str, tensors: Mapping[str, Tensor], scheme: str) -> QuantizedWeight:
    """Undo ``stored``.

    Other writers store scales in BF16, or without the dimensions of size 1, and fp8_block's also
    under the other name; all are read.

    Raises:
        ConfigError: a tensor is missing, or does not fit the layout; names it.
    """
    rules = SCHEMES[scheme]
    scale_name = next((name + end for end in SCALES if name + end in tensors), name + rules.scale)
    for part in (name, scale_name):
        if part not in tensors:
            raise ConfigError(f"{part} is missing from a checkpoint of {scheme}")
    values, scale = tensors[name], tensors[scale_name]
    if values.dtype != rules.dtype or values.ndim != 2:
        raise ConfigError(
            f"{name} is {values.dtype} {list(values.shape)}, {scheme} weights are {rules.dtype} "
            "[out, in]"
        )
    shape = scale_grid(values.shape, rules.block)
    if not scale.is_floating_point() or _long_sizes(scale.shape) != _long_sizes(shape):
        raise ConfigError(
            f"{scale_name} is {scale.dtype} {list(scale.shape)}, the scale of "
            f"{name} {list(values.shape)} must be torch.float32 {list(shape)}"
        )
    return QuantizedWeight(values, scale.float().reshape(shape), rules.block)


def _long_sizes(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def quantization_config(scheme: str, ignore: Sequence[str], *, experts: bool = False) -> dict:
    """Return the entry ``quantization_config`` of config.json.

    Args:
        experts: the model has some.
        ignore: linear modules that stay in high precision (``lm_head``, MoE routers), named as in
            the checkpoint.
    """
    layout = INT8_EXPERTS if experts and scheme == "int8" else CONFIGS[scheme]
    unquantized = "modules_to_not_convert" if layout["quant_method"] == "fp8" else "ignore"
    return {**copy.deepcopy(layout), unquantized: list(ignore)}


def read_quantization(config: Mapping) -> str | None:
    """Return the scheme of the checkpoint that a config.json describes; None: it is not quantized.

    Other tools' files in the same layout are recognised, too.

    Raises:
        ConfigError: it is quantized in a way that this package does not read.
    """
    stated = config.get("quantization_config")
    if not stated:
        return None
    if not isinstance(stated, dict):
        raise ConfigError(f"config.json: quantization_config must be an object, got {stated!r:.80}")
    for scheme, expected in _READ:
        if _agrees(expected, stated):
            return scheme
    method = stated.get("quant_algo") or stated.get("format") or stated.get("quant_method")
    raise ConfigError(
        f"config.json: quantization_config ({method}) is not a layout this package reads; it reads "
        "W8A8 with dynamic activations: compressed-tensors' int8 or FP8 per channel, and FP8 in "
        "blocks of 128 x 128"
    )


def _agrees(expected: object, stated: object) -> bool:
    """Return whether ``stated`` says all that ``expected`` says; it may say more."""
    if isinstance(expected, dict):
        if not isinstance(stated, dict):
            return False
        groups = expected.get("config_groups")
        if groups is not None:
            named = stated.get("config_groups")  # whatever their names
            other_groups = list(named.values()) if isinstance(named, dict) else []
            if len(other_groups) != 1 or not _agrees(*groups.values(), *other_groups):
                return False  # mixed precision, or another
        compared_keys = expected.keys() - _INCIDENTAL - {"config_groups"}
        return all(key in stated and _agrees(expected[key], stated[key]) for key in compared_keys)
    if isinstance(expected, str):
        return isinstance(stated, str) and stated.lower() == expected.lower()
    return stated == expected
