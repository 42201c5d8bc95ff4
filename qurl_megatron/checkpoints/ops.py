"""Invertible steps between Hugging Face and Megatron tensors, as one table for all model families.

An op works on one tensor-parallel shard as well as on the whole weight: slice every Hugging Face
tensor along its split dimension, apply the op, and the result is that rank's Megatron parameter. So
loading never sees a whole fused weight, and export never gathers one.

All families are one block with switches (a bias on q, k and v; a norm on q and k; experts in place
of the MLP), so they share one table. Layer numbers are global: a pipeline stage asks for its own
layers and the ends it holds.

A family is added as a row of ``tensors.arch.FAMILIES`` that says how it differs from Llama::

    FAMILIES = {
        "llama": Family(),
        "qwen3": Family(qk_norm=True),  # a norm on q and k; read from here on as arch.qk_norm
        ...

If the row needs a switch that is not there yet, add it to ``Family`` and ``Arch``, its tensors to
``tensors.table`` and ``layer_ops``, and its arithmetic to ``actor``. Everything else its config can
say and this package does not compute, ``read_arch`` must refuse by name. The family's name in
``FAMILIES`` of tests/support/models.py puts it through the tests: every stored tensor has one op,
logits and gradients equal transformers' in every layout, folding leaves the function as it was.

Imports no torch: memory planning reads this table without it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from qurl_megatron.tensors.arch import Arch
from qurl_megatron.tensors.table import HfTensor, hf_tensor

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


def embedding(arch: Arch) -> Same:
    return Same("embedding.word_embeddings.weight", hf_tensor(arch, "model.embed_tokens.weight"))


def output_layer(arch: Arch) -> Same:
    """The output projection; with tied embeddings a last stage's own copy of them."""
    name = "model.embed_tokens.weight" if arch.tied else "lm_head.weight"
    return Same("output_layer.weight", hf_tensor(arch, name))


@lru_cache(maxsize=256)  # a plan asks again and again for the same layers of many experts
def layer_ops(arch: Arch, layer: int, *, fused_norms: bool) -> tuple[Op, ...]:
    """Ops of one decoder layer.

    Args:
        layer: global layer number, from 0.
        fused_norms: Transformer Engine keeps each block's norm inside the linear layer that
            reads it; where several read it (experts and their router), it stays a layer.
    """
    mg = f"decoder.layers.{layer}."
    attention_norm = (
        "self_attention.linear_qkv.layer_norm_weight" if fused_norms else "input_layernorm.weight"
    )
    mlp_norm = (
        "mlp.linear_fc1.layer_norm_weight"
        if fused_norms and not arch.experts
        else "pre_mlp_layernorm.weight"
    )

    def hf(name: str) -> HfTensor:
        return hf_tensor(arch, f"model.layers.{layer}.{name}")

    def qkv(kind: str) -> FusedQKV:
        q, k, v = (hf(f"self_attn.{x}_proj.{kind}") for x in "qkv")
        return FusedQKV(
            f"{mg}self_attention.linear_qkv.{kind}",
            q,
            k,
            v,
            head_dim=arch.head_dim,
            queries_per_group=arch.queries_per_group,
        )

    def mlp(megatron: str, name: str) -> list[Op]:
        gate, up, down = (hf(f"{name}.{x}_proj.weight") for x in ("gate", "up", "down"))
        return [
            GateUp(f"{mg}{megatron}.linear_fc1.weight", gate, up),
            Same(f"{mg}{megatron}.linear_fc2.weight", down),
        ]

    ops: list[Op] = [
        Same(mg + attention_norm, hf("input_layernorm.weight")),
        qkv("weight"),
        Same(mg + "self_attention.linear_proj.weight", hf("self_attn.o_proj.weight")),
        Same(mg + mlp_norm, hf("post_attention_layernorm.weight")),
    ]
    if arch.experts:
        ops.append(Same(mg + "mlp.router.weight", hf("mlp.gate.weight")))
        for expert in range(arch.experts.count):
            ops += mlp(f"mlp.experts.local_experts.{expert}", f"mlp.experts.{expert}")
    else:
        ops += mlp("mlp", "mlp")
    if arch.qkv_bias:
        ops.append(qkv("bias"))
    if arch.qk_norm:
        ops += [
            Same(f"{mg}self_attention.{x}_layernorm.weight", hf(f"self_attn.{x}_norm.weight"))
            for x in "qk"
        ]
    return tuple(ops)


def stage_ops(
    arch: Arch, layers: range, *, first: bool, last: bool, fused_norms: bool = False
) -> list[Op]:
    """Ops of one pipeline stage.

    Args:
        layers: the global layer numbers this stage holds.
        first: the stage holds the embedding.
        last: the stage holds the final norm and the output layer. Where embeddings are tied and the
            stage is also the first, the output layer is the embedding itself and has no op.
    """
    ops: list[Op] = [embedding(arch)] if first else []
    for layer in layers:
        ops += layer_ops(arch, layer, fused_norms=fused_norms)
    if last:
        ops.append(Same("decoder.final_layernorm.weight", hf_tensor(arch, "model.norm.weight")))
        if not (arch.tied and first):
            ops.append(output_layer(arch))
    return ops


def hf_shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
    """The shape a config gives to each Hugging Face tensor of the model."""
    ops = stage_ops(arch, range(arch.num_layers), first=True, last=True)
    return {tensor.name: tensor.shape for op in ops for tensor in op.hf}


def parameter_count(arch: Arch) -> int:
    """Numbers in a checkpoint of the model."""
    return sum(math.prod(shape) for shape in hf_shapes(arch).values())
