"""What a Hugging Face ``config.json`` says about a decoder, in the terms this package uses.

One reader for trainer, converter and engine. Anything that would change the function computed and
that is not understood here is refused by name: a model that loads and is slightly wrong is the
worst outcome.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qurl_megatron.errors import ConfigError

FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Llama 3's stretching of the low rotary frequencies to longer contexts."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class Arch:
    """Sizes and switches of one dense decoder."""

    family: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rms_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None
    max_position: int
    tied: bool  # the output layer is the embedding
    qkv_bias: bool
    qk_norm: bool

    @property
    def queries_per_group(self) -> int:
        return self.heads // self.kv_heads

    def check_parallel(self, tensor: int, pipeline: int) -> None:
        """Raise ``ConfigError`` unless the sizes divide over the ranks."""
        for what, size in (
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("intermediate_size", self.intermediate),
        ):
            if size % tensor:
                raise ConfigError(
                    f"parallel.tensor={tensor} does not divide the model's {what}={size}; "
                    f"use one of {_divisors(self.heads, self.kv_heads, self.intermediate)}"
                )
        if self.num_layers % pipeline:
            raise ConfigError(
                f"parallel.pipeline={pipeline} does not divide the model's "
                f"num_hidden_layers={self.num_layers}; use one of {_divisors(self.num_layers)}"
            )


def read_config(folder: str | Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint folder, as it is written.

    Raises:
        ConfigError: the folder or the file is missing or is not JSON.
    """
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise ConfigError(
            f"model.path={folder} is not a folder; set it to a Hugging Face checkpoint"
        )
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing; model.path must be a Hugging Face checkpoint folder"
        ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None


def read_arch(config: dict[str, Any]) -> Arch:
    """Interpret a Hugging Face config.

    Raises:
        ConfigError: unknown family, missing key, or a switch this package does not compute.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"config.json: model_type {family!r} is not supported; known: {', '.join(FAMILIES)}"
        )
    if config.get("use_sliding_window"):
        raise ConfigError("config.json: use_sliding_window=true is not supported; set it to false")
    if config.get("mlp_bias") or (family != "qwen2" and config.get("attention_bias")):
        raise ConfigError(
            "config.json: mlp_bias and attention_bias are not supported; the model needs them false"
        )
    if config.get("quantization_config"):
        raise ConfigError(
            "config.json: quantization_config means quantized weights; "
            "give the checkpoint they were made from"
        )
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("config.json: partial_rotary_factor is not supported; it must be 1.0")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(
            f"config.json: hidden_act {config['hidden_act']!r} is not supported; only silu is"
        )
    try:
        heads = config["num_attention_heads"]
        rope_theta, rope_scaling = _rope(config)
        arch = Arch(
            family=family,
            num_layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            rms_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position=config.get("max_position_embeddings", 2048),
            tied=config.get("tie_word_embeddings", False),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
        )
    except KeyError as error:
        raise ConfigError(f"config.json lacks the key {error}") from None
    if arch.heads % arch.kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads={arch.heads} is no multiple of "
            f"num_key_value_heads={arch.kv_heads}"
        )
    return arch


def read_eos(folder: str | Path) -> tuple[int, ...]:
    """Tokens that end a response; generation_config.json wins, chat models list them only there."""
    generation = Path(folder) / "generation_config.json"
    eos = None
    if generation.is_file():
        eos = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id")
    if eos is None:
        eos = read_config(folder).get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _rope(config: dict[str, Any]) -> tuple[float, Llama3Rope | None]:
    """Base and scaling, from transformers 5's ``rope_parameters`` or the older two keys."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta", config.get("rope_theta", 10_000.0)))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "llama3":
        names = Llama3Rope.__dataclass_fields__
        missing = [name for name in names if name not in parameters]
        if missing:
            raise ConfigError(f"config.json: rope scaling of type llama3 lacks {missing}")
        return theta, Llama3Rope(**{name: parameters[name] for name in names})
    raise ConfigError(f"config.json: rope_type {kind!r} is not supported; known: default, llama3")


def _divisors(*sizes: int) -> list[int]:
    return [n for n in range(1, min(sizes) + 1) if all(size % n == 0 for size in sizes)]
