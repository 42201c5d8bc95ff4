"""Invertible steps between Hugging Face and Megatron tensors, as one table for all model families.

An op works on one tensor-parallel shard as well as on the whole weight: slice every Hugging Face
tensor along its split dimension, apply the op, and the result is that rank's Megatron parameter. So
loading never sees a whole fused weight, and export never gathers one.

All families are one block with switches (a bias on q, k and v; a norm on q and k; experts in place
of the MLP), so they share one table. Layer numbers are global: a pipeline stage asks for its own
layers and the ends it holds.

Imports no torch: memory planning reads this table without it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from qurl_megatron.tensors.arch import Arch
from qurl_megatron.tensors.table import HfTensor, hf_tensor

if TYPE_CHECKING:
    from torch import Tensor


Params = Mapping[str, "Tensor"]


@dataclass(frozen=True)
class Op:
    """One Megatron parameter and the Hugging Face tensors it is made of; by itself, one tensor."""

    megatron: str
    hf: tuple[HfTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, in which the rows of its tensors lie one after another."""
        return (sum(tensor.shape[0] for tensor in self.hf), *self.hf[0].shape[1:])

    def to_megatron(self, hf: Params) -> "Tensor":
        return hf[self.hf[0].name]

    def to_hf(self, megatron: "Tensor") -> dict[str, "Tensor"]:
        return {self.hf[0].name: megatron}


@dataclass(frozen=True)
class FusedQKV(Op):
    """Megatron interleaves q, k and v per query group: rows are [(q q .. k v) x groups].

    A shard holds whole groups, so rows can be regrouped on it alone. Biases are rows of width one.
    """

    head_dim: int
    queries_per_group: int

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
class GateUp(Op):
    """Megatron stacks each rank's gate rows on its up rows, for one product before SwiGLU."""

    def to_megatron(self, hf: Params) -> "Tensor":
        from torch import cat

        return cat([hf[tensor.name] for tensor in self.hf])

    def to_hf(self, megatron: "Tensor") -> dict[str, "Tensor"]:
        gate, up = megatron.chunk(2)
        return {self.hf[0].name: gate, self.hf[1].name: up}


@lru_cache(maxsize=256)  # a plan asks again and again for the same layers of many experts
def layer_ops(arch: Arch, layer: int, *, fused_norms: bool) -> tuple[Op, ...]:
    """Return the ops of one decoder layer.

    Args:
        layer: global layer number, from 0.
        fused_norms: Transformer Engine keeps each block's norm inside the linear layer that
            reads it; where several read it (experts and their router), it stays a layer.
    """
    mg = f"decoder.layers.{layer}."
    attention_norm, mlp_norm = "input_layernorm.weight", "pre_mlp_layernorm.weight"
    if fused_norms:
        attention_norm = "self_attention.linear_qkv.layer_norm_weight"
    if fused_norms and not arch.experts:
        mlp_norm = "mlp.linear_fc1.layer_norm_weight"

    def op(megatron: str, name: str) -> Op:
        return Op(f"{mg}{megatron}", tensors(name))

    def tensors(*names: str) -> tuple[HfTensor, ...]:
        return tuple(hf_tensor(arch, f"model.layers.{layer}.{name}") for name in names)

    def qkv(kind: str) -> FusedQKV:
        return FusedQKV(
            f"{mg}self_attention.linear_qkv.{kind}",
            tensors(*(f"self_attn.{x}_proj.{kind}" for x in "qkv")),
            head_dim=arch.head_dim,
            queries_per_group=arch.queries_per_group,
        )

    def mlp(megatron: str, name: str) -> list[Op]:
        gate_up = tensors(f"{name}.gate_proj.weight", f"{name}.up_proj.weight")
        return [
            GateUp(f"{mg}{megatron}.linear_fc1.weight", gate_up),
            op(f"{megatron}.linear_fc2.weight", f"{name}.down_proj.weight"),
        ]

    ops: list[Op] = [
        op(attention_norm, "input_layernorm.weight"),
        qkv("weight"),
        op("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
        op(mlp_norm, "post_attention_layernorm.weight"),
    ]
    if arch.experts:
        ops.append(op("mlp.router.weight", "mlp.gate.weight"))
        for expert in range(arch.experts.count):
            ops += mlp(f"mlp.experts.local_experts.{expert}", f"mlp.experts.{expert}")
        if arch.experts.shared:
            ops += mlp("mlp.shared_experts", "mlp.shared_expert")
            ops.append(op("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"))
    else:
        ops += mlp("mlp", "mlp")
    if arch.qkv_bias:
        ops.append(qkv("bias"))
    if arch.qk_norm:
        for x in "qk":
            ops.append(op(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight"))
    return tuple(ops)


def stage_ops(
    arch: Arch, layers: range, *, first: bool, last: bool, fused_norms: bool = False
) -> list[Op]:
    """Return the ops of one pipeline stage.

    Args:
        layers: the global layer numbers this stage holds.
        first: the stage holds the embedding.
        last: the stage holds the final norm and the output layer. With tied embeddings a last stage
            has a copy of the embedding for it; one that is also the first uses its own, without op.
    """
    embedding = "model.embed_tokens.weight"
    ops: list[Op] = []
    if first:
        ops.append(Op("embedding.word_embeddings.weight", (hf_tensor(arch, embedding),)))
    for layer in layers:
        ops += layer_ops(arch, layer, fused_norms=fused_norms)
    if last:
        ops.append(Op("decoder.final_layernorm.weight", (hf_tensor(arch, "model.norm.weight"),)))
        if not (arch.tied and first):
            head = embedding if arch.tied else "lm_head.weight"
            ops.append(Op("output_layer.weight", (hf_tensor(arch, head),)))
    return ops


def ops_on_disk(arch: Arch) -> list[Op]:
    """Return all ops of a model in the order of its layers, by Megatron's names in checkpoints."""
    layers = range(arch.num_layers)
    return stage_ops(arch, layers, first=True, last=True, fused_norms=True)


def hf_shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
    """Return the shape that a config gives to each Hugging Face tensor of the model."""
    return {tensor.name: tensor.shape for op in ops_on_disk(arch) for tensor in op.hf}


def parameter_count(arch: Arch) -> int:
    """Return how many numbers a checkpoint of the model holds."""
    return sum(math.prod(shape) for shape in hf_shapes(arch).values())
