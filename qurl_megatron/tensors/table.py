"""What is known of each Hugging Face tensor by its name: one row per kind, which all else reads.

A name without its numbers is the key of its row: ``model.layers.3.mlp.experts.7.up_proj.weight`` is
a ``model.layers.mlp.experts.up_proj``. From the row and the model's sizes follow the shape of its
weight, bias and scale, how ranks split them, whether rollouts run them at 8 bits, and what UAQ does
to them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from qurl_megatron.errors import ConfigError
from qurl_megatron.tensors.arch import Arch

_NUMBER = re.compile(r"\.\d+(?=\.)")


@dataclass(frozen=True)
class Units:
    """What a dimension is made of: runs of rows (columns) that ranks get whole."""

    count: int
    width: int  # of one
    key: str  # that gives the count in config.json
    repeats: bool = False  # where engine ranks outnumber them, several ranks hold each

    @property
    def length(self) -> int:
        return self.count * self.width


Axis = Literal["hidden", "head", "queries", "keys", "inner", "expert", "experts", "vocabulary"]

AXES: Mapping[Axis, Callable[[Arch], Units]] = {
    "hidden": lambda arch: Units(arch.hidden, 1, "hidden_size"),
    "head": lambda arch: Units(arch.head_dim, 1, "head_dim"),
    "queries": lambda arch: Units(arch.heads, arch.head_dim, "num_attention_heads"),
    "keys": lambda arch: Units(arch.kv_heads, arch.head_dim, "num_key_value_heads", repeats=True),
    "inner": lambda arch: Units(arch.intermediate, 1, "intermediate_size"),
    "expert": lambda arch: Units(arch.experts.intermediate, 1, "moe_intermediate_size"),
    "experts": lambda arch: Units(arch.experts.count, 1, "num_experts"),
    "vocabulary": lambda arch: Units(arch.vocab, 1, "vocab_size"),
}


@dataclass(frozen=True)
class Kind:
    """A row: the weights of one name, in every layer of every model."""

    rows: Axis
    columns: Axis | None = None  # None: a vector, of a norm
    split: int | None = None  # the dimension that tensor parallelism splits; None: all have it all
    quantized: bool = False  # rollouts run it at 8 bits; all else stays in high precision
    uaq: Literal["norm", "reader"] | None = None  # is scaled up, or reads what was


_QUERIES = Kind("queries", "hidden", split=0, quantized=True, uaq="reader")
_KEYS = Kind("keys", "hidden", split=0, quantized=True, uaq="reader")
_GATE_UP = Kind("inner", "hidden", split=0, quantized=True, uaq="reader")
_EXPERT_GATE_UP = Kind("expert", "hidden", split=0, quantized=True, uaq="reader")

KINDS: Mapping[str, Kind] = {
    "model.embed_tokens": Kind("vocabulary", "hidden", split=0),
    "model.layers.input_layernorm": Kind("hidden", uaq="norm"),
    "model.layers.self_attn.q_proj": _QUERIES,
    "model.layers.self_attn.k_proj": _KEYS,
    "model.layers.self_attn.v_proj": _KEYS,
    "model.layers.self_attn.q_norm": Kind("head"),
    "model.layers.self_attn.k_norm": Kind("head"),
    "model.layers.self_attn.o_proj": Kind("hidden", "queries", split=1, quantized=True),
    "model.layers.post_attention_layernorm": Kind("hidden", uaq="norm"),
    "model.layers.mlp.gate_proj": _GATE_UP,
    "model.layers.mlp.up_proj": _GATE_UP,
    "model.layers.mlp.down_proj": Kind("hidden", "inner", split=1, quantized=True),
    "model.layers.mlp.gate": Kind("experts", "hidden", uaq="reader"),
    "model.layers.mlp.experts.gate_proj": _EXPERT_GATE_UP,
    "model.layers.mlp.experts.up_proj": _EXPERT_GATE_UP,
    "model.layers.mlp.experts.down_proj": Kind("hidden", "expert", split=1, quantized=True),
    "model.norm": Kind("hidden"),
    "lm_head": Kind("vocabulary", "hidden", split=0),
}


@dataclass(frozen=True)
class HfTensor:
    """A tensor of one model."""

    name: str
    shape: tuple[int, ...]
    split_dim: int | None = None  # that tensor parallelism splits; None: every rank has it all
    units: Units | None = None  # of that dimension
    zero_centred: bool = False  # a norm that stores its gain minus one

    @property
    def quantized(self) -> bool:
        return is_quantized(self.name)

    @property
    def vocabulary(self) -> bool:
        return is_vocabulary(self.name)


def hf_tensor(arch: Arch, name: str) -> HfTensor:
    """The tensor of this name in a model: a weight, a bias, or a ``weight_scale`` [rows, 1].

    Raises:
        ConfigError: there is no row for it.
    """
    kind, value = _row(name)
    if kind is None:
        raise ConfigError(f"tensor {name} is not one whose split over ranks is known")
    rows = AXES[kind.rows](arch)
    if value == "weight" and kind.columns is not None:
        columns = AXES[kind.columns](arch)
        units = None if kind.split is None else (rows, columns)[kind.split]
        return HfTensor(name, (rows.length, columns.length), kind.split, units)
    shape = (rows.length, 1) if value == "weight_scale" else (rows.length,)
    if kind.columns is None:
        return HfTensor(name, shape, zero_centred=arch.zero_centred_norm)
    # Scales and biases run along the output rows, of which every rank of split columns has all.
    return HfTensor(name, shape, 0, rows) if kind.split == 0 else HfTensor(name, shape)


def is_quantized(name: str) -> bool:
    """True for the linear weights that rollouts run at 8 bits; all else stays in high precision."""
    kind = _kind_of_weight(name)
    return kind is not None and kind.quantized


def is_vocabulary(name: str) -> bool:
    """True for the tensors with a row per token, which tensor parallelism may pad."""
    kind = _kind_of_weight(name)
    return kind is not None and kind.rows == "vocabulary"


def uaq_role(name: str) -> Literal["norm", "reader"] | None:
    """What UAQ does to a tensor: a norm is scaled up, its readers down; None: nothing."""
    kind = _kind_of_weight(name)
    return None if kind is None else kind.uaq


def _kind_of_weight(name: str) -> Kind | None:
    kind, value = _row(name)
    return kind if value == "weight" else None


@lru_cache(maxsize=1 << 16)
def _row(name: str) -> tuple[Kind | None, str]:
    """Its row, and which of the row's tensors it is."""
    key, _, value = _NUMBER.sub("", name).rpartition(".")
    return KINDS.get(key), value
