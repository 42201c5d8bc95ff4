"""Update-aware quantization (paper Sec. 4.3, Eq. 11): fold s into norms and their readers.

norm weight * s, linear weight / s: the function stays the same, while the linear's gradient grows
by s and its quantization step shrinks by s. Everything that reads the norm takes part: q, k and v;
gate and up, of every expert; the router that chooses among them, and a shared expert's gate. o_proj
and down_proj follow no norm and stay; so do biases and q/k-norms. ``config["qurl"]["uaq_scale"]``
records the fold; folding twice is refused.

This changes a learning rate. W / s has the same codes as W, and Adam's step does not grow
with the gradient: as long as its eps is small beside the gradients and nothing else looks at
sizes, training the folded model *is* training the unfolded one with s times the learning rate for
the weights divided here and 1 / s of it for the norms (``benchmarks/folding.py`` shows it).
These are about two thirds of the linear weights, so s = 1.5 has a third more codes change in a
step, as 1.33 times the learning rate has. Weight decay, eps, a clipped gradient norm and BF16
rounding make the two part; docs/algorithms.md has by how much.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import read_family
from qurl_megatron.tensors.table import uaq_role

_LARGEST = 1000.0  # the paper's are 1.5 and 2; far beyond, FP32 has no room


def folded(name: str, weight: Tensor, scale: float) -> Tensor:
    """Return the weight of Hugging Face tensor ``name`` with ``scale`` folded in if it takes part.

    Other tensors are returned as they are. Works on any slice of the tensor. Fold in FP32: rounding
    W/1.5 to BF16 alone moves 5 % of INT8 codes.
    """
    role = uaq_role(name)
    if scale == 1.0 or role is None:
        return weight
    if role == "reader":
        return weight / scale
    return weight * scale


def unfolded(name: str, weight: Tensor, scale: float) -> Tensor:
    """Undo ``folded`` by the same ``scale``, with one rounding more."""
    role = uaq_role(name)
    if scale == 1.0 or role is None:
        return weight
    if role == "reader":
        return weight * scale
    return weight / scale


def fold_uaq(
    state_dict: Mapping[str, Tensor], config: dict[str, Any], scale: float
) -> dict[str, Tensor]:
    """Fold ``scale`` into a Hugging Face state dict; ``config`` is marked in place.

    Raises:
        ConfigError: the config says that a factor is folded already, or names a model whose
            norms are not known.
    """
    refuse_second_fold(config, scale)
    read_family(config)  # Gemma's norms multiply by 1 + their weight
    out = {name: folded(name, weight, scale) for name, weight in state_dict.items()}
    config["qurl"] = {**config.get("qurl", {}), "uaq_scale": scale}
    return out


def unfold_uaq(state_dict: Mapping[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Undo ``fold_uaq`` by the factor the config records, and remove the record."""
    read_family(config)
    scale = folded_scale(config)
    out = {name: unfolded(name, weight, scale) for name, weight in state_dict.items()}
    config.pop("qurl", None)
    return out


def folded_scale(config: Mapping[str, Any]) -> float:
    """Return the factor that a config says is folded into its weights; 1.0: none.

    Raises:
        ConfigError: the config names no valid factor.
    """
    record = config.get("qurl", {})
    scale = record.get("uaq_scale", 1.0) if isinstance(record, dict) else None
    if not isinstance(scale, int | float) or not 1.0 <= scale < math.inf:
        raise ConfigError(f"config.json: qurl={record!r} does not name a UAQ factor of 1.0 or more")
    return float(scale)


def refuse_second_fold(config: Mapping[str, Any], scale: float) -> None:
    """Raise ``ConfigError`` if ``scale`` is no factor, or would be folded on top of another."""
    if not 1.0 <= scale <= _LARGEST:
        raise ConfigError(f"the UAQ factor must lie between 1.0 and {_LARGEST:g}, got {scale}")
    already = folded_scale(config)
    if already != 1.0 and scale != 1.0:
        raise ConfigError(
            f"the checkpoint already has the UAQ factor {already} folded in and cannot be folded "
            f"again by {scale}; use {already} in a recipe (quant.uaq_scale) and none in a tool"
        )
