"""A decoder as its Hugging Face ``config.json`` describes it, in the terms of this package.

One reader for trainer, converter and engine. Anything that would change the function computed and
that is not understood here is refused by name: a model that loads and is slightly wrong is the
worst outcome.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qurl_megatron.kit.disk import read_json
from qurl_megatron.kit.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Family:
    """Facts that a ``model_type`` fixes by its name alone, or where ``config.json`` is silent."""

    qkv_bias: bool = False
    qk_norm: bool = False
    routed: bool = False  # every layer has experts in place of one MLP
    shared: bool = False  # and one more that all tokens meet
    head_dim: int | None = None  # unless the config says; None: hidden size over heads
    window: int | None = None  # sliding attention window, unless the config says


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(window=4096),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True, head_dim=128),
    "qwen2_moe": Family(qkv_bias=True, routed=True, shared=True),
    "qwen3_moe": Family(qk_norm=True, routed=True),
}

FIXED: Mapping[str, Any] = {
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
}
"""Keys of config.json that change the computation, and the one value that each may have."""


@dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Llama 3's stretching of the low rotary frequencies to longer contexts."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


MEGATRON_LLAMA3_ROPE = Llama3Rope(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
"""Constants that Megatron hard-codes beside the factor."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The router of a layer and the MLPs it chooses from."""

    count: int
    top_k: int
    intermediate: int  # of one expert
    norm_topk_prob: bool  # the chosen experts' probabilities are made to sum to one
    shared: int = 0  # intermediate size of one that every token meets through a gate; 0: none


@dataclass(frozen=True, kw_only=True)
class Arch:
    """Sizes and switches of one decoder."""

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
    experts: Experts | None = None  # every layer's, in place of its MLP

    @property
    def routed(self) -> Experts:
        """The experts of a model that has them."""
        assert self.experts is not None
        return self.experts

    @property
    def queries_per_group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def stacked(self) -> tuple[int, ...]:
        """Layers, and the experts of each: leading axes of tensors in a Megatron checkpoint."""
        if self.experts is None:
            return (self.num_layers,)
        return self.num_layers, self.experts.count

    def check_parallel(
        self,
        tensor: int,
        pipeline: int,
        expert: int = 1,
        *,
        tensor_key: str = "parallel.tensor",
    ) -> None:
        """Raise ``ConfigError`` unless the sizes divide over the ranks.

        Args:
            tensor_key: the user's name for the first number.
        """
        if tensor < 1:
            raise ConfigError(f"{tensor_key} must be 1 or more, got {tensor}")
        sizes = {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads}
        if self.experts is None:
            sizes["intermediate_size"] = self.intermediate
        elif expert == 1:
            sizes["moe_intermediate_size"] = self.experts.intermediate
        if self.experts and self.experts.shared:
            sizes["shared_expert_intermediate_size"] = self.experts.shared
        for size_name, size in sizes.items():
            if size % tensor:
                raise ConfigError(
                    f"{tensor_key}={tensor} does not divide the model's {size_name}={size}; "
                    f"use one of {_divisors(*sizes.values())}"
                )
        if self.num_layers % pipeline:
            raise ConfigError(
                f"parallel.pipeline={pipeline} does not divide the model's "
                f"num_hidden_layers={self.num_layers}; use one of {_divisors(self.num_layers)}"
            )
        if expert > 1 and self.experts is None:
            raise ConfigError(
                f"parallel.expert={expert} deals experts to ranks, and the model has none; set it "
                "to 1"
            )
        if self.experts and self.experts.count % expert:
            raise ConfigError(
                f"parallel.expert={expert} does not divide the model's "
                f"num_experts={self.experts.count}; use one of {_divisors(self.experts.count)}"
            )

    def check_megatron(self) -> None:
        """Raise ``ConfigError`` if Megatron computes the model in another way."""
        scaling = self.rope_scaling
        if scaling and replace(scaling, factor=8.0) != MEGATRON_LLAMA3_ROPE:
            raise ConfigError(
                f"config.json: Megatron computes {MEGATRON_LLAMA3_ROPE} with any factor, "
                f"the model has {scaling}"
            )


NOT_COMPUTED = ("family", "max_position")
"""Fields of an ``Arch`` that do not change the function its weights compute: all that a family
means is in the others, and the other is a limit."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return ``config.json`` of a checkpoint folder, as it is written.

    Raises:
        ConfigError: the folder or the file is missing or is not JSON.
    """
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise ConfigError(f"{folder} is not a folder; name a Hugging Face checkpoint")
    if not path.is_file():
        raise ConfigError(f"{path} is missing; {folder} must be a Hugging Face checkpoint folder")
    return read_json(path)


def arch_of(folder: str | Path, *, quantized: bool = False) -> Arch:
    """Return the architecture that a checkpoint folder's ``config.json`` describes.

    Args:
        quantized: allow quantized weights.

    Raises:
        ConfigError: as ``read_config`` and ``read_arch``, with the file's path.
    """
    config = read_config(folder)
    if quantized:
        config.pop("quantization_config", None)
    try:
        return read_arch(config)
    except ConfigError as error:  # which begins with the name of the file
        raise ConfigError(f"{folder}/{error}") from None


def read_arch(config: dict[str, Any]) -> Arch:
    """Interpret a Hugging Face config.

    Raises:
        ConfigError: unknown family, missing key, a value of the wrong type, or a switch this
            package does not compute.
    """
    try:
        return _arch(config)
    except KeyError as error:
        raise ConfigError(f"config.json lacks the key {error}") from None
    except (TypeError, AttributeError) as error:  # a list where an object belongs, or the like
        raise ConfigError(f"config.json has a value of the wrong type ({error})") from None


def _arch(config: dict[str, Any]) -> Arch:
    family = read_family(config)
    refuse_unknown_switches(config, family)
    heads, hidden = (_count(config, key) for key in ("num_attention_heads", "hidden_size"))
    rope_theta, rope_scaling = _rope(config)
    arch = Arch(
        family=config["model_type"],
        num_layers=_count(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads", heads),
        head_dim=_count(config, "head_dim", family.head_dim or hidden // heads),
        intermediate=_count(config, "intermediate_size"),
        vocab=_count(config, "vocab_size"),
        rms_eps=_number(config, "rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position=_count(config, "max_position_embeddings", 2048),
        tied=_switch(config, "tie_word_embeddings"),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        experts=_experts(config, family) if family.routed else None,
    )
    if arch.heads % arch.kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads={arch.heads} is not a multiple of "
            f"num_key_value_heads={arch.kv_heads}"
        )
    if arch.experts and arch.experts.top_k > arch.experts.count:
        raise ConfigError(
            f"config.json: num_experts_per_tok={arch.experts.top_k} is more than "
            f"num_experts={arch.experts.count}"
        )
    return arch


def refuse_unknown_switches(config: dict[str, Any], family: Family) -> None:
    """Raise ``ConfigError`` if a key asks for a computation that is not understood here."""
    if config.get("quantization_config"):
        raise ConfigError(
            "config.json: quantization_config means quantized weights; "
            "give the checkpoint they were made from"
        )
    supported = {**FIXED, "layer_types": "full_attention"}
    actual = {**config, **_rope_parameters(config)}
    kinds = _as_list(config.get("layer_types") or [])
    actual["layer_types"] = next((kind for kind in kinds if kind != "full_attention"), None)
    supported["qkv_bias" if family.qkv_bias else "attention_bias"] = family.qkv_bias
    if family.window is not None:
        supported["sliding_window"] = None  # equal if prompt and response together are shorter
        actual.setdefault("sliding_window", family.window)
    for key, value in supported.items():
        if actual.get(key) is not None and actual[key] != value:
            raise ConfigError(
                f"config.json: {key}={json.dumps(actual[key])[:80]} is not supported; it must be "
                f"{json.dumps(value)}"
            )


LARGEST_COUNT = 1 << 31
"""Bound on layers, heads, sizes and token ids; no model comes near."""
LARGEST_NUMBER = 1e12


def _as_list(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def _value(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """Return the value of a key, which may be left out or null where there is a default."""
    if default is None:
        return config[key]
    value = config.get(key)
    return default if value is None else value


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _value(config, key, default)
    if type(value) is not int or not 1 <= value < LARGEST_COUNT:
        raise ConfigError(
            f"config.json: {key} must be a positive whole number below 2^31, got {value!r:.80}"
        )
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _value(config, key, default)
    if type(value) not in (int, float) or not 0 < value <= LARGEST_NUMBER:
        raise ConfigError(f"config.json: {key} must be a positive number, got {value!r:.80}")
    return float(value)


def _switch(config: Mapping[str, Any], key: str) -> bool:
    value = _value(config, key, False)
    if type(value) is not bool:
        raise ConfigError(f"config.json: {key} must be true or false, got {value!r:.80}")
    return value


def read_family(config: Mapping[str, Any]) -> Family:
    """Return the family that a config names.

    Raises:
        ConfigError: it is not one of those this package computes.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(
            f"config.json: model_type {name!r} is not supported; known: {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def read_aux_coef(config: Mapping[str, Any]) -> float:
    """Return ``router_aux_loss_coef``, or transformers' default if a config leaves it out."""
    value = _value(config, "router_aux_loss_coef", 0.001)
    if type(value) not in (int, float) or not 0 <= value <= LARGEST_NUMBER:
        raise ConfigError(
            f"config.json: router_aux_loss_coef must be 0 or a positive number, got {value!r:.80}"
        )
    return float(value)


def read_eos(folder: str | Path) -> tuple[int, ...]:
    """Return the tokens that end a response; generation_config.json wins, as chat models list them
    only there."""
    for_generation = _eos_ids(Path(folder) / "generation_config.json")
    return for_generation or _eos_ids(Path(folder) / "config.json")


@dataclass(frozen=True)
class StopIds:
    """Tokens that end a response."""

    always: frozenset[int]  # with every engine
    known: frozenset[int]  # with some of them: SGLang reads more files than others do


def read_stop_ids(folder: str | Path, of_tokenizer: Iterable[int] = ()) -> StopIds:
    """Return a model's end tokens; ``of_tokenizer`` are those that its tokenizer names."""
    always = frozenset(read_eos(folder))
    return StopIds(always, always.union(_eos_ids(Path(folder) / "config.json"), of_tokenizer))


def _eos_ids(file: Path) -> tuple[int, ...]:
    """Return the end tokens that a file names, if any."""
    if not file.is_file():
        return ()
    eos = read_json(file).get("eos_token_id")
    if eos is None:
        return ()
    ids = _as_list(eos)
    if not all(type(token) is int and 0 <= token < LARGEST_COUNT for token in ids):
        raise ConfigError(
            f"{file}: eos_token_id must be a token id or a list of them, got {eos!r:.80}"
        )
    return tuple(ids)


def facts_of(folder: str | Path) -> dict[str, Any]:
    """Return the facts that decide an engine's numbers, as JSON: sizes and switches by their
    names in ``Arch``, and the tokens that end a response.

    Two models of equal tensors may differ in these alone.

    Raises:
        ConfigError: as ``arch_of``.
    """
    sizes = asdict(arch_of(folder, quantized=True))
    for name in NOT_COMPUTED:
        del sizes[name]
    return {**sizes, "eos_token_id": sorted(read_eos(folder))}


def _experts(config: dict[str, Any], family: Family) -> Experts:
    return Experts(
        # transformers 5 writes the second name.
        count=_count(config, "num_experts" if "num_experts" in config else "num_local_experts"),
        top_k=_count(config, "num_experts_per_tok"),
        intermediate=_count(config, "moe_intermediate_size"),
        norm_topk_prob=_switch(config, "norm_topk_prob"),
        shared=_count(config, "shared_expert_intermediate_size") if family.shared else 0,
    )


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return base and scaling, where transformers 5 writes them, or the older scaling alone."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    parameters = config.get(key) or {}
    if not isinstance(parameters, dict):
        raise ConfigError(f"config.json: {key} must be an object, got {parameters!r:.80}")
    return parameters


def _rope(config: dict[str, Any]) -> tuple[float, Llama3Rope | None]:
    parameters = _rope_parameters(config)
    theta = _number({"rope_theta": 10_000.0, **config, **parameters}, "rope_theta")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ConfigError(
            f"config.json: rope_type {kind!r} is not supported; known: default, llama3"
        )
    return theta, Llama3Rope(
        factor=_number(parameters, "factor"),
        low_freq_factor=_number(parameters, "low_freq_factor"),
        high_freq_factor=_number(parameters, "high_freq_factor"),
        original_max_position_embeddings=_count(parameters, "original_max_position_embeddings"),
    )


def _divisors(*sizes: int) -> list[int]:
    """Return the common divisors up to 1024, more ranks than split any layer."""
    return [n for n in range(1, 1025) if all(size % n == 0 for size in sizes)]
