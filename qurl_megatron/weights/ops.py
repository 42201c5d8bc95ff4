"""Invertible steps between Hugging Face tensors and Megatron parameters.

An op works on one tensor-parallel shard as well as on the whole weight: slice every Hugging Face
tensor along its split dimension, apply the op, and the result is that rank's Megatron parameter. So
loading never sees a whole fused weight, and export never gathers one.

What they are made of is known without torch: sums of memory need no more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Params = Mapping[str, "Tensor"]


@dataclass(frozen=True)
class HfTensor:
    """A Hugging Face tensor's name and what must be known to read a part of it."""

    name: str
    split_dim: int | None  # the dimension split by tensor parallelism; None: every rank has it all
    zero_centred: bool = False  # a norm that stores its gain minus one


class Op(Protocol):
    """One Megatron parameter and the Hugging Face tensors it is made of."""

    megatron: str

    @property
    def hf(self) -> tuple[HfTensor, ...]: ...

    def to_megatron(self, hf: Params) -> "Tensor": ...

    def to_hf(self, megatron: "Tensor") -> dict[str, "Tensor"]: ...


@dataclass(frozen=True)
class Same:
    """One tensor under two names."""

    megatron: str
    hf_name: str
    split_dim: int | None = None
    zero_centred: bool = False

    @property
    def hf(self) -> tuple[HfTensor, ...]:
        return (HfTensor(self.hf_name, self.split_dim, self.zero_centred),)

    def to_megatron(self, hf: Params) -> "Tensor":
        return hf[self.hf_name]

    def to_hf(self, megatron: "Tensor") -> dict[str, "Tensor"]:
        return {self.hf_name: megatron}


@dataclass(frozen=True)
class FusedQKV:
    """Megatron interleaves q, k and v per query group: rows are [(q q .. k v) x groups].

    A shard holds whole groups, so rows can be regrouped on it alone. Biases are rows of width one.
    """

    megatron: str
    q: str
    k: str
    v: str
    head_dim: int
    queries_per_group: int

    @property
    def hf(self) -> tuple[HfTensor, ...]:
        return tuple(HfTensor(name, 0) for name in (self.q, self.k, self.v))

    def to_megatron(self, hf: Params) -> "Tensor":
        from torch import cat

        q, k, v = (hf[name] for name in (self.q, self.k, self.v))
        groups = k.shape[0] // self.head_dim
        per_group = [x.reshape(groups, -1, *x.shape[1:]) for x in (q, k, v)]
        return cat(per_group, dim=1).flatten(0, 1)

    def to_hf(self, megatron: "Tensor") -> dict[str, "Tensor"]:
        rows = [self.queries_per_group * self.head_dim, self.head_dim, self.head_dim]
        per_group = megatron.reshape(-1, sum(rows), *megatron.shape[1:]).split(rows, dim=1)
        return {
            name: x.flatten(0, 1)
            for name, x in zip((self.q, self.k, self.v), per_group, strict=True)
        }


@dataclass(frozen=True)
class GateUp:
    """Megatron stacks each rank's gate rows on its up rows, for one product before SwiGLU."""

    megatron: str
    gate: str
    up: str

    @property
    def hf(self) -> tuple[HfTensor, ...]:
        return (HfTensor(self.gate, 0), HfTensor(self.up, 0))

    def to_megatron(self, hf: Params) -> "Tensor":
        from torch import cat

        return cat([hf[self.gate], hf[self.up]])

    def to_hf(self, megatron: "Tensor") -> dict[str, "Tensor"]:
        gate, up = megatron.chunk(2)
        return {self.gate: gate, self.up: up}
