"""The table of ops of each model family: what lies where, as data.

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
"""

from functools import lru_cache

from qurl_megatron.checkpoints.ops import FusedQKV, GateUp, Op, Same
from qurl_megatron.tensors.arch import Arch
from qurl_megatron.tensors.table import HfTensor, hf_tensor


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
