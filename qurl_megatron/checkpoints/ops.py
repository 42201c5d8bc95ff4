"""Invertible steps between Hugging Face tensors and Megatron parameters.

An op works on one tensor-parallel shard as well as on the whole weight: slice every Hugging Face
tensor along its split dimension, apply the op, and the result is that rank's Megatron parameter. So
loading never sees a whole fused weight, and export never gathers one.

What they are made of is known without torch: sums of memory need no more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from qurl_megatron.tensors.table import HfTensor

if TYPE_CHECKING:
    from torch import Tensor

Params = Mapping[str, "Tensor"]


class Op(Protocol):
    """One Megatron parameter, its whole shape, and the Hugging Face tensors it is made of."""

    @property
    def megatron(self) -> str: ...

    @property
    def hf(self) -> tuple[HfTensor, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def to_megatron(self, hf: Params) -> "Tensor": ...

    def to_hf(self, megatron: "Tensor") -> dict[str, "Tensor"]: ...


@dataclass(frozen=True)
class Same:
    """One tensor under two names."""

    megatron: str
    tensor: HfTensor

    @property
    def hf(self) -> tuple[HfTensor, ...]:
        return (self.tensor,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def to_megatron(self, hf: Params) -> "Tensor":
        return hf[self.tensor.name]

    def to_hf(self, megatron: "Tensor") -> dict[str, "Tensor"]:
        return {self.tensor.name: megatron}


@dataclass(frozen=True)
class FusedQKV:
    """Megatron interleaves q, k and v per query group: rows are [(q q .. k v) x groups].

    A shard holds whole groups, so rows can be regrouped on it alone. Biases are rows of width one.
    """

    megatron: str
    q: HfTensor
    k: HfTensor
    v: HfTensor
    head_dim: int
    queries_per_group: int

    @property
    def hf(self) -> tuple[HfTensor, ...]:
        return (self.q, self.k, self.v)

    @property
    def shape(self) -> tuple[int, ...]:
        return _stacked(self.hf)

    def to_megatron(self, hf: Params) -> "Tensor":
        from torch import cat

        q, k, v = (hf[tensor.name] for tensor in self.hf)
        groups = k.shape[0] // self.head_dim
        per_group = [x.reshape(groups, -1, *x.shape[1:]) for x in (q, k, v)]
        return cat(per_group, dim=1).flatten(0, 1)

    def to_hf(self, megatron: "Tensor") -> dict[str, "Tensor"]:
        rows = [self.queries_per_group * self.head_dim, self.head_dim, self.head_dim]
        per_group = megatron.reshape(-1, sum(rows), *megatron.shape[1:]).split(rows, dim=1)
        return {tensor.name: x.flatten(0, 1) for tensor, x in zip(self.hf, per_group, strict=True)}


@dataclass(frozen=True)
class GateUp:
    """Megatron stacks each rank's gate rows on its up rows, for one product before SwiGLU."""

    megatron: str
    gate: HfTensor
    up: HfTensor

    @property
    def hf(self) -> tuple[HfTensor, ...]:
        return (self.gate, self.up)

    @property
    def shape(self) -> tuple[int, ...]:
        return _stacked(self.hf)

    def to_megatron(self, hf: Params) -> "Tensor":
        from torch import cat

        return cat([hf[self.gate.name], hf[self.up.name]])

    def to_hf(self, megatron: "Tensor") -> dict[str, "Tensor"]:
        gate, up = megatron.chunk(2)
        return {self.gate.name: gate, self.up.name: up}


def _stacked(tensors: tuple[HfTensor, ...]) -> tuple[int, ...]:
    """The shape of tensors whose rows lie in one."""
    return (sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:])
