"""The layouts in which a quantized checkpoint is written, one per family of loaders.

Each stores a weight's values under the weight's own name, [O, I], and a float32 scale beside it
that multiplies them. They differ in the scale's name and shape, and in ``config.json``.
Which engines read which layout is in ``FORMATS``; a layout that none reads is refused.

Shapes: O = output channels, I = input channels, R x C = the squares of 128 x 128 over them.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.quant.weights import QuantizedWeight
from qurl_megatron.schemes import BLOCK, EXPORTED, SCHEMES


def _column(rows: int, columns: int) -> tuple[int, ...]:
    return rows, 1


def _vector(rows: int, columns: int) -> tuple[int, ...]:
    return (rows,)


def _grid(rows: int, columns: int) -> tuple[int, ...]:
    return -(-rows // BLOCK), -(-columns // BLOCK)


def _grid_4d(rows: int, columns: int) -> tuple[int, ...]:
    return -(-rows // BLOCK), 1, -(-columns // BLOCK), 1


@dataclass(frozen=True)
class ExportLayout:
    """How one family of loaders wants one scheme."""

    scale: str  # stands in the place of ``weight`` in the name of the scale
    scale_shape: Callable[[int, int], tuple[int, ...]]  # of a weight [O, I]
    config: dict  # ``quantization_config`` of config.json, without the modules left as they were
    ignore_key: str = "ignore"  # where they are listed
    patterns: bool = False  # the loaders also read ``re:`` entries in that list
    always_ignored: tuple[str, ...] = ()  # the loaders read no list: they skip modules so named
    experts: bool = True  # the loaders also read the experts of a mixture


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


# format -> scheme -> layout.
FORMATS: dict[str, dict[str, ExportLayout]] = {
    # SGLang, vLLM and transformers.
    "compressed-tensors": {
        "int8": ExportLayout(
            "weight_scale",
            _column,
            _compressed("int", {"strategy": "channel"}, {"strategy": "token"}),
            patterns=True,
        ),
        "fp8": ExportLayout(
            "weight_scale",
            _column,
            _compressed("float", {"strategy": "channel"}, {"strategy": "token"}),
            patterns=True,
        ),
        "fp8_block": ExportLayout(
            "weight_scale",
            _grid,
            _compressed(
                "float",
                {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
                {"strategy": "group", "group_size": BLOCK},
            ),
            patterns=True,
        ),
    },
    # SGLang's own loaders; vLLM and transformers read the fp8_block one too.
    "sglang": {
        "int8": ExportLayout("weight_scale", _column, {"quant_method": "w8a8_int8"}, patterns=True),
        "fp8": ExportLayout(
            "weight_scale",
            _column,
            {"quant_method": "w8a8_fp8"},
            patterns=True,
            always_ignored=("lm_head", "gate", "shared_expert_gate"),
        ),
        "fp8_block": ExportLayout(
            "weight_scale_inv",
            _grid,
            {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
            },
            ignore_key="modules_to_not_convert",
        ),
    },
    # vLLM; SGLang refuses both. The algorithms are spelled as ModelOpt's own
    # export spells them, lower case included. "wo" (weights only) is its word, but engines quantize
    # the activations too, per group of 128. vLLM reads experts of FP8 with a scale per tensor only.
    "modelopt": {
        "fp8": ExportLayout(
            "weight_scale",
            _vector,
            {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
            experts=False,
        ),
        "fp8_block": ExportLayout(
            "weight_scale",
            _grid_4d,
            {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"},
            experts=False,
        ),
    },
}

# (scheme, format) -> why not.
_REFUSED = {
    ("int8", "modelopt"): (
        "int8 in format modelopt is loaded by neither vLLM nor SGLang, which read its FP8 and FP4 "
        "only; use format compressed-tensors or sglang"
    )
}

# Keys of a found config that may differ and the tensors still mean the same.
_INCIDENTAL = {"targets", "quantization_status"}


def layout(scheme: str, fmt: str) -> ExportLayout:
    """Return the layout of a scheme in a format.

    Raises:
        ConfigError: either name is unknown, or no engine reads the scheme in this format.
    """
    if fmt not in FORMATS:
        raise ConfigError(f"unknown checkpoint format {fmt!r}; known are {sorted(FORMATS)}")
    if scheme not in EXPORTED:
        raise ConfigError(f"unknown quantization scheme {scheme!r}; known are {sorted(EXPORTED)}")
    if (scheme, fmt) in _REFUSED:
        raise ConfigError(_REFUSED[scheme, fmt])
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
        ConfigError: the loaders of this layout could not read the weight; names it.
    """
    want = layout(scheme, fmt)
    if len(shape) != 2:
        raise ConfigError(f"cannot store {name} {list(shape)} quantized: it must be [out, in]")
    if ".experts." in name and not want.experts:
        raise ConfigError(
            f"neither vLLM nor SGLang loads experts of {scheme} in format {fmt}, and {name} is "
            "one; use format compressed-tensors or sglang"
        )
    if SCHEMES[scheme].block is not None and any(size % BLOCK for size in shape):
        # Activations are quantized in whole groups of 128, fused q/k/v and gate/up are whole
        # squares: vLLM, SGLang and compressed-tensors all stop at such a weight, at load or later.
        raise ConfigError(
            f"engines run {scheme} weights only if both sizes are multiples of {BLOCK}, {name} is "
            f"{list(shape)}; use scheme fp8"
        )
    return {
        name: (tuple(shape), SCHEMES[scheme].dtype),
        scale_name(name, scheme, fmt): (want.scale_shape(*shape), torch.float32),
    }


def stored(name: str, quantized: QuantizedWeight, fmt: str) -> dict[str, Tensor]:
    """Return the tensors that stand for a weight, as ``stored_shapes`` announces them."""
    scheme = scheme_of(quantized)
    shapes = stored_shapes(name, quantized.values.shape, scheme, fmt)
    scale = scale_name(name, scheme, fmt)
    return {name: quantized.values, scale: quantized.scale.reshape(shapes[scale][0])}


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
    shape = (_column if rules.block is None else _grid)(*values.shape)
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
            the checkpoint; or ``re:`` and a regular expression, in layouts that read one.

    Raises:
        ConfigError: the loaders of this layout would quantize one of these modules all the same.
    """
    want = layout(scheme, fmt)
    for module in ignore:
        _check_ignored(module, want, scheme, fmt)
    return {**copy.deepcopy(want.config), want.ignore_key: list(ignore)}


def _check_ignored(module: str, want: ExportLayout, scheme: str, fmt: str) -> None:
    if module.startswith("re:") and not want.patterns:
        raise ConfigError(
            f"the loaders of {scheme} in format {fmt} read no patterns: name the modules that "
            f"{module!r} stands for, or use format compressed-tensors"
        )
    last = module.removeprefix("re:").rstrip("$").rsplit(".", 1)[-1]
    if want.always_ignored and last not in want.always_ignored:
        raise ConfigError(
            f"the loaders of {scheme} in format {fmt} quantize every linear module but "
            f"{', '.join(want.always_ignored)}, so {module} cannot stay as it is; use format "
            "compressed-tensors"
        )


def extra_files(scheme: str, fmt: str, ignore: Sequence[str]) -> dict[str, dict]:
    """JSON files that a format wants beside config.json: file name -> contents."""
    config = quantization_config(scheme, fmt, ignore)
    if fmt != "modelopt":
        return {}
    # Loaders that know this file alone tell ModelOpt's layout by the producer's name.
    return {
        "hf_quant_config.json": {
            "producer": {"name": "modelopt"},
            "quantization": {
                "quant_algo": config["quant_algo"],
                "kv_cache_quant_algo": None,
                "exclude_modules": list(ignore),
            },
        }
    }


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
