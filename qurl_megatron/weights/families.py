"""The table of ops of each model family: what lies where, as data.

All families are one block with switches (a bias on q, k and v; a norm on q and k; experts in place
of the MLP), so they share one table. Layer numbers are global: a pipeline stage asks for its own
layers and the ends it holds.

A family is added as a row of ``arch.FAMILIES`` that says how it differs from Llama::

    FAMILIES = {
        "llama": Family(),
        "qwen3": Family(qk_norm=True),  # a norm on q and k; read from here on as arch.qk_norm
        ...

If the row needs a switch that is not there yet, add it to ``Family`` and ``Arch``, its tensors to
``layer_ops`` and its arithmetic to ``model``. If tensors read a norm under new names, add them to
``uaq``. Everything else its config can say and this package does not compute, ``read_arch`` must
refuse by name. The family's name in ``testing.models.FAMILIES`` then puts it through the tests:
every stored tensor has one op, logits and gradients equal transformers' in every layout, folding
leaves the function as it was.
"""

from qurl_megatron.weights.arch import Arch
from qurl_megatron.weights.ops import FusedQKV, GateUp, Op, Same

EMBEDDING = Same("embedding.word_embeddings.weight", "model.embed_tokens.weight", split_dim=0)


def output_layer(arch: Arch) -> Same:
    """The output projection; with tied embeddings a last stage's own copy of them."""
    name = "model.embed_tokens.weight" if arch.tied else "lm_head.weight"
    return Same("output_layer.weight", name, split_dim=0)


def layer_ops(arch: Arch, layer: int, *, fused_norms: bool) -> list[Op]:
    """Ops of one decoder layer.

    Args:
        layer: global layer number, from 0.
        fused_norms: Transformer Engine keeps each block's norm inside the linear layer that
            reads it; where several read it (experts and their router), it stays a layer.
    """
    hf, mg = f"model.layers.{layer}.", f"decoder.layers.{layer}."
    attention_norm = (
        "self_attention.linear_qkv.layer_norm_weight" if fused_norms else "input_layernorm.weight"
    )
    mlp_norm = (
        "mlp.linear_fc1.layer_norm_weight"
        if fused_norms and not arch.experts
        else "pre_mlp_layernorm.weight"
    )
    ops: list[Op] = [
        _norm(arch, mg + attention_norm, hf + "input_layernorm.weight"),
        _qkv(arch, hf, mg, "weight"),
        Same(mg + "self_attention.linear_proj.weight", hf + "self_attn.o_proj.weight", split_dim=1),
        _norm(arch, mg + mlp_norm, hf + "post_attention_layernorm.weight"),
    ]
    if arch.experts:
        ops.append(Same(mg + "mlp.router.weight", hf + "mlp.gate.weight"))
        for expert in range(arch.experts.count):
            ops += _mlp(f"{hf}mlp.experts.{expert}.", f"{mg}mlp.experts.local_experts.{expert}.")
    else:
        ops += _mlp(hf + "mlp.", mg + "mlp.")
    if arch.qkv_bias:
        ops.append(_qkv(arch, hf, mg, "bias"))
    if arch.qk_norm:
        ops += [
            _norm(
                arch, f"{mg}self_attention.{x}_layernorm.weight", f"{hf}self_attn.{x}_norm.weight"
            )
            for x in "qk"
        ]
    return ops


def _norm(arch: Arch, megatron: str, hf: str) -> Same:
    return Same(megatron, hf, zero_centred=arch.zero_centred_norm)


def _mlp(hf: str, mg: str) -> list[Op]:
    return [
        GateUp(mg + "linear_fc1.weight", hf + "gate_proj.weight", hf + "up_proj.weight"),
        Same(mg + "linear_fc2.weight", hf + "down_proj.weight", split_dim=1),
    ]


def _qkv(arch: Arch, hf: str, mg: str, kind: str) -> FusedQKV:
    return FusedQKV(
        f"{mg}self_attention.linear_qkv.{kind}",
        *(f"{hf}self_attn.{x}_proj.{kind}" for x in "qkv"),
        head_dim=arch.head_dim,
        queries_per_group=arch.queries_per_group,
    )


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
    ops: list[Op] = [EMBEDDING] if first else []
    for layer in layers:
        ops += layer_ops(arch, layer, fused_norms=fused_norms)
    if last:
        ops.append(_norm(arch, "decoder.final_layernorm.weight", "model.norm.weight"))
        if not (arch.tied and first):
            ops.append(output_layer(arch))
    return ops


def is_quantized(hf_name: str) -> bool:
    """True for the linear weights that rollouts run at 8 bits; all else stays in high precision."""
    return hf_name.startswith("model.layers.") and hf_name.endswith("_proj.weight")


def is_vocabulary(hf_name: str) -> bool:
    """True for the tensors with a row per token, which tensor parallelism may pad."""
    return hf_name in ("model.embed_tokens.weight", "lm_head.weight")
