"""Facts about each Hugging Face tensor, by its name: one row per kind, which all code reads.

A name with 0 for its numbers leads to its row: ``model.layers.3.mlp.experts.7.up_proj.weight`` is
the weight of a ``model.layers.0.mlp.experts.0.up_proj``. From the row and the model's sizes follow
the shape of its weight, bias and scale, how ranks split them, whether rollouts run them at 8 bits,
and their part in UAQ.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.schemes import BLOCK, SCALES, scale_grid
from qurl_megatron.tensors.arch import Arch

_NUMBER = re.compile(r"\.\d+(?=\.)")
VALUES = ("weight", "bias", *(f"weight{end}" for end in SCALES))


@dataclass(frozen=True)
class Units:
    """The units of a dimension: runs of rows (columns) that ranks get whole."""

    count: int
    width: int  # of one
    key: str  # that gives the count in config.json
    repeats: bool = False  # where engine ranks outnumber them, several ranks hold each

    @property
    def length(self) -> int:
        return self.count * self.width


Axis = Literal[
    "hidden", "head", "queries", "keys", "inner", "expert", "experts", "shared", "one", "vocabulary"
]

AXES: Mapping[Axis, Callable[[Arch], Units]] = {
    "hidden": lambda arch: Units(arch.hidden, 1, "hidden_size"),
    "head": lambda arch: Units(arch.head_dim, 1, "head_dim"),
    "queries": lambda arch: Units(arch.heads, arch.head_dim, "num_attention_heads"),
    "keys": lambda arch: Units(arch.kv_heads, arch.head_dim, "num_key_value_heads", repeats=True),
    "inner": lambda arch: Units(arch.intermediate, 1, "intermediate_size"),
    "expert": lambda arch: Units(arch.routed.intermediate, 1, "moe_intermediate_size"),
    "experts": lambda arch: Units(arch.routed.count, 1, "num_experts"),
    "shared": lambda arch: Units(arch.routed.shared, 1, "shared_expert_intermediate_size"),
    "one": lambda arch: Units(1, 1, ""),
    "vocabulary": lambda arch: Units(arch.vocab, 1, "vocab_size"),
}


@dataclass(frozen=True)
class TensorRow:
    """Facts that all tensors of one name share, in every layer of every model."""

    rows: Axis
    columns: Axis | None = None  # None: a vector, of a norm
    split: int | None = None  # the dimension that tensor parallelism splits; None: all have it all
    quantized: bool = False  # rollouts run it at 8 bits; all else stays in high precision
    uaq: Literal["norm", "reader"] | None = None  # is scaled up, or reads a scaled one


_QUERIES = TensorRow("queries", "hidden", split=0, quantized=True, uaq="reader")
_KEYS = TensorRow("keys", "hidden", split=0, quantized=True, uaq="reader")
_GATE_UP = TensorRow("inner", "hidden", split=0, quantized=True, uaq="reader")
_EXPERT_GATE_UP = TensorRow("expert", "hidden", split=0, quantized=True, uaq="reader")
_SHARED_GATE_UP = TensorRow("shared", "hidden", split=0, quantized=True, uaq="reader")

ROWS: Mapping[str, TensorRow] = {
    "model.embed_tokens": TensorRow("vocabulary", "hidden", split=0),
    "model.layers.0.input_layernorm": TensorRow("hidden", uaq="norm"),
    "model.layers.0.self_attn.q_proj": _QUERIES,
    "model.layers.0.self_attn.k_proj": _KEYS,
    "model.layers.0.self_attn.v_proj": _KEYS,
    "model.layers.0.self_attn.q_norm": TensorRow("head"),
    "model.layers.0.self_attn.k_norm": TensorRow("head"),
    "model.layers.0.self_attn.o_proj": TensorRow("hidden", "queries", split=1, quantized=True),
    "model.layers.0.post_attention_layernorm": TensorRow("hidden", uaq="norm"),
    "model.layers.0.mlp.gate_proj": _GATE_UP,
    "model.layers.0.mlp.up_proj": _GATE_UP,
    "model.layers.0.mlp.down_proj": TensorRow("hidden", "inner", split=1, quantized=True),
    "model.layers.0.mlp.gate": TensorRow("experts", "hidden", uaq="reader"),
    "model.layers.0.mlp.experts.0.gate_proj": _EXPERT_GATE_UP,
    "model.layers.0.mlp.experts.0.up_proj": _EXPERT_GATE_UP,
    "model.layers.0.mlp.experts.0.down_proj": TensorRow(
        "hidden", "expert", split=1, quantized=True
    ),
    "model.layers.0.mlp.shared_expert.gate_proj": _SHARED_GATE_UP,
    "model.layers.0.mlp.shared_expert.up_proj": _SHARED_GATE_UP,
    "model.layers.0.mlp.shared_expert.down_proj": TensorRow(
        "hidden", "shared", split=1, quantized=True
    ),
    "model.layers.0.mlp.shared_expert_gate": TensorRow("one", "hidden", uaq="reader"),
    "model.norm": TensorRow("hidden"),
    "lm_head": TensorRow("vocabulary", "hidden", split=0),
}
_OTHER = TensorRow("hidden")  # takes part in nothing


class HfTensor(NamedTuple):  # models have 100,000: a frozen dataclass takes longer to make
    """A tensor of one model."""

    name: str
    shape: tuple[int, ...]
    split_dim: int | None = None  # that tensor parallelism splits; None: every rank has it all
    units: Units | None = None  # of that dimension, in elements of the weight
    quantized: bool = False  # see ``is_quantized``
    vocabulary: bool = False  # see ``is_vocabulary``
    block: int = 1  # rows and columns of the weight that a value stands for

    def part(self, start: int, stop: int, mend: str) -> tuple[int, int]:
        """Return where values for rows (or columns) ``[start, stop)`` of the weight begin and end.

        Raises:
            ConfigError: a square would be cut; names the ``mend``.
        """
        assert self.units is not None, "what is split has units"
        first, last = -(-start // self.block), -(-stop // self.block)
        inner = stop < self.units.length and stop % self.block
        if start % self.block or inner:
            weight = self.name.removesuffix(SCALES[1])
            lines = ("rows", "columns")[self.split_dim or 0]
            raise ConfigError(
                f"tensor {weight}: {lines} [{start}, {stop}) of {self.units.length} begin or end "
                f"inside a square of {self.block} x {self.block} that shares a scale; use {mend}, "
                "or quant.scheme=fp8"
            )
        return first, last


def hf_tensor(arch: Arch, name: str) -> HfTensor:
    """Return the tensor of this name in a model: a weight, bias, ``weight_scale`` [rows, 1], or a
    ``weight_scale_inv`` with a value per square of the weight.

    Raises:
        ConfigError: there is no row for it, or it is of experts and the model has none.
    """
    facts = _facts(arch, _NUMBER.sub(".0", name))
    if facts is None:
        raise ConfigError(f"tensor {name} is not one whose split over ranks is known")
    return HfTensor(name, *facts)


@lru_cache(maxsize=1 << 10)  # by row and not by name: a model has up to 100,000 names
def _facts(arch: Arch, key: str) -> tuple | None:
    """Return an ``HfTensor`` without its name; None if the model can have no such tensor."""
    owner, _, value = key.rpartition(".")
    row = ROWS.get(owner)
    if row is None or value not in VALUES:
        return None
    axes = {row.rows, row.columns}
    if arch.experts is None and axes & {"expert", "experts"}:
        return None
    if axes & {"shared", "one"} and not (arch.experts and arch.experts.shared):
        return None
    rows = AXES[row.rows](arch)
    shape: tuple[int, ...] = (rows.length, 1) if value == "weight_scale" else (rows.length,)
    if row.columns is None:
        return HfTensor(key, shape)[1:]
    columns = AXES[row.columns](arch)
    split = None if row.split is None else (rows, columns)[row.split]
    if value == "weight_scale_inv":
        grid = scale_grid((rows.length, columns.length), BLOCK)
        return HfTensor(key, grid, row.split, split, block=BLOCK)[1:]
    if value != "weight":
        # They run along the output rows; ranks that split columns have all of these.
        return HfTensor(key, shape, *((0, rows) if row.split == 0 else ()))[1:]
    return HfTensor(
        key,
        (rows.length, columns.length),
        row.split,
        split,
        quantized=row.quantized,
        vocabulary=row.rows == "vocabulary",
    )[1:]


def is_quantized(name: str) -> bool:
    """Return whether rollouts run a weight at 8 bits; all else stays in high precision."""
    return _row_of_weight(name).quantized


def is_vocabulary(name: str) -> bool:
    """Return whether a tensor has a row per token, which tensor parallelism may pad."""
    return _row_of_weight(name).rows == "vocabulary"


def is_expert(name: str) -> bool:
    """Return whether a weight is an expert's; experts are dealt to ranks."""
    row = _row_of_weight(name)
    return "expert" in (row.rows, row.columns)


def uaq_role(name: str) -> Literal["norm", "reader"] | None:
    """Return a tensor's part in UAQ: a norm is scaled up, its readers down; None: nothing."""
    return _row_of_weight(name).uaq


def _row_of_weight(name: str) -> TensorRow:
    owner, _, value = _NUMBER.sub(".0", name).rpartition(".")
    if value != "weight":
        return _OTHER
    return ROWS.get(owner, _OTHER)
