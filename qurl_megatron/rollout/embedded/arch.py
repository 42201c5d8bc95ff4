"""The shape of a decoder, read from a Hugging Face config.json without transformers.

Qwen2, Qwen3 and Llama differ in three facts only: bias on q/k/v, norms on q and k, and how the
rotary frequencies are scaled. Whatever else a config asks for is refused by name: an engine that
ignores a key generates plausible tokens from the wrong policy.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qurl_megatron.errors import ConfigError

FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class Arch:
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    tied: bool  # lm_head is the embedding
    qkv_bias: bool
    qk_norm: bool
    rope: dict  # rope_type, rope_theta and, for llama3, its four numbers
    eos: tuple[int, ...]

    @staticmethod
    def read(folder: Path) -> "Arch":
        """Read ``config.json`` (and the end-of-sequence ids of ``generation_config.json``).

        Raises:
            ConfigError: a file is missing or asks for something this engine does not compute.
        """
        config = _read_json(folder / "config.json")
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ConfigError(f"model_type {family!r} of {folder} is not one of {list(FAMILIES)}")
        _refuse_unsupported(config)
        heads = config["num_attention_heads"]
        arch = Arch(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            norm_eps=config.get("rms_norm_eps", 1e-6),
            max_positions=config.get("max_position_embeddings", 2048),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            rope=_rope(config),
            eos=_eos(folder, config),
        )
        if arch.heads % arch.kv_heads:
            raise ConfigError(
                f"num_attention_heads {heads} is no multiple of num_key_value_heads {arch.kv_heads}"
            )
        return arch

    def inverse_frequencies(self) -> Tensor:
        """[head_dim / 2] float32 rotary frequencies, by transformers' formulas."""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        inverse = 1.0 / (self.rope["rope_theta"] ** exponent)
        return inverse if self.rope["rope_type"] == "default" else _llama3(inverse, self.rope)


def _llama3(inverse: Tensor, rope: dict) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, middle ones blend, short ones stay."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    old_context = rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    stretched = torch.where(wavelength > old_context / low, inverse / rope["factor"], inverse)
    smooth = (old_context / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / rope["factor"] + smooth * stretched
    middle = (wavelength >= old_context / high) & (wavelength <= old_context / low)
    return torch.where(middle, blended, stretched)


def _rope(config: dict) -> dict:
    """transformers 5 writes ``rope_parameters``, 4 ``rope_theta`` and ``rope_scaling``."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if rope["rope_type"] not in ("default", "llama3"):
        raise ConfigError(
            f"rope_type {rope['rope_type']!r} is not supported; the engine has default and llama3"
        )
    if rope["rope_type"] == "llama3":
        needed = (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
        missing = [key for key in needed if key not in rope]
        if missing:
            raise ConfigError(f"rope scaling of type llama3 lacks {missing}")
    return rope


def _refuse_unsupported(config: dict) -> None:
    refused = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for key, bad in refused.items():
        if bad:
            raise ConfigError(
                f"{key} = {config[key]!r} in config.json is not supported by the engine"
            )


def _eos(folder: Path, config: dict) -> tuple[int, ...]:
    """generation_config.json wins: chat models list their end-of-turn token only there."""
    generation = folder / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    eos = config.get("eos_token_id") if eos is None else eos
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give a Hugging Face model folder") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
