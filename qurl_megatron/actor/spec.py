"""Layer specs: Transformer Engine's on a GPU that has it, else Megatron's local one, completed.

Transformer Engine fuses norms into the linear layers behind them. Layers that compute with the
engines' codes (``aligned``) are the local spec's, with its norms, on GPUs too; the attention
between them is Transformer Engine's where that is there. Checkpoints have the same names.

Megatron's own local spec lacks three things that are needed without Transformer Engine: an RMSNorm
that knows sequence parallelism, a causal attention that takes no mask but packed sequences and
context parallelism, and a router whose product is torch's. All are spec entries, not patches.

Shapes: s = this rank's part of the sequence, b = batch, h = this rank's heads, g = its key/value
groups, d = head size.
"""

import math
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn
from torch.nn import functional

from qurl_megatron.actor.aligned import Align, AlignedColumn, AlignedRow
from qurl_megatron.actor.context import ContextPart
from qurl_megatron.actor.megatron import axis_of
from qurl_megatron.config.env import use_transformer_engine


def decoder_spec(
    config: TransformerConfig, *, qk_norm: bool, align: Align | None = None
) -> ModuleSpec | TransformerBlockSubmodules:
    """Return the spec that GPTModel builds its decoder from.

    Transformer Engine multiplies all experts in one grouped product; else they are a list of MLPs.

    Args:
        align: how the linear layers follow the engines'; None: they do not.
    """
    experts = config.num_moe_experts
    if use_transformer_engine() and align is None:
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=experts is not None, qk_layernorm=qk_norm
        )
    layer = get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, normalization="HfRMSNorm", qk_layernorm=qk_norm
    )
    parts = _submodules(layer.submodules.mlp)
    if experts:
        # Checkpoints use Transformer Engine's names. It cannot fuse the norm that router and
        # experts read, but Megatron's local spec renames that norm as if it were fused.
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
        parts.router = Router
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = HfRMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CausalAttention
    if align is not None:
        column = ModuleSpec(module=AlignedColumn, params={"align": align})
        row = ModuleSpec(module=AlignedRow, params={"align": align})
        attention.linear_qkv, attention.linear_proj = column, row
        blocks = [parts]
        if experts:
            blocks = [_submodules(parts.experts), _submodules(parts.shared_experts)]
        for products in blocks:
            products.linear_fc1, products.linear_fc2 = column, row
        if use_transformer_engine():
            from megatron.core.extensions.transformer_engine import TEDotProductAttention

            attention.core_attention = TEDotProductAttention
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = HfRMSNorm
    layers_here = config.num_layers // config.pipeline_model_parallel_size
    return TransformerBlockSubmodules(layer_specs=[layer] * layers_here, layer_norm=HfRMSNorm)


def _submodules(spec: ModuleSpec | partial) -> Any:
    """Return a module's parts; Megatron-Core 0.17 gives experts as builders, 0.18 any MLP."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


class HfRMSNorm(nn.Module):
    """Root-mean-square norm, rounded as Hugging Face rounds it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums the gradients of marked weights over the tensor ranks: each saw a part of
        # the sequence. It adds the attribute, as here.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Router(TopKRouter):
    """Megatron's router, whose product wants Transformer Engine even where that is absent."""

    def gating(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight)


class CausalAttention(MegatronModule):
    """Grouped-query causal attention through torch's fused kernel.

    Sequences are padded on the right, so causality alone keeps padding out of every real token.
    Context-parallel ranks gather keys and values, and attend with the queries they have.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type,
        attention_type,
        softmax_scale: float | None = None,
        *,
        pg_collection: ProcessGroupCollection,
        **_,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.context = axis_of(pg_collection.cp)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask=None,
        packed_seq_params: PackedSeqParams | None = None,
        **_,
    ) -> Tensor:
        """[s, b, h, d], [s, b, g, d], [s, b, g, d] -> [s, b, h*d]; packed, all come without b."""
        assert attention_mask is None, "right-padded causal batches need no mask"
        if packed_seq_params is None:
            starts = (0, len(query) * self.context.size)
        else:
            starts = tuple(packed_seq_params.cu_seqlens_q.tolist())
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        part = ContextPart(self.context, starts)
        if self.context.size > 1:  # together: one collective, not two
            key, value = part.gather(torch.stack((key, value)))
        outs, done = [], 0
        for run in part.runs:
            count = run.stop - run.first
            up_to_run = slice(run.sequence, run.stop)
            outs.append(self._attend(query[done : done + count], key[up_to_run], value[up_to_run]))
            done += count
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with queries that belong to the last of the keys' positions."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        new, keys = q.shape[2], k.shape[2]
        mask = None
        if new < keys:
            mask = torch.ones(new, keys, dtype=torch.bool, device=q.device).tril(keys - new)
        out = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.permute(2, 0, 1, 3).flatten(2)
