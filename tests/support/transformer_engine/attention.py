"""Attention and rotary embedding, over packed sequences and context-parallel ranks.

A context-parallel rank r of n has chunks r and 2n-1-r of the 2n equal ones of every sequence.

Shapes: s = this rank's positions of a sequence, t = its positions of all packed ones, b = batch,
h = heads, g = key/value groups, d = head size.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.transformer_engine.layers import _Module


class DotProductAttention(_Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        tp_group: dist.ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: dist.ProcessGroup | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: object = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        assert attention_dropout == 0.0 and attn_mask_type == "causal", "not built here"
        self.set_tensor_parallel_group(tp_group)
        self.groups = (num_gqa_groups or num_attention_heads) // tp_size
        self.scale = softmax_scale or kv_channels**-0.5
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        self.register_load_state_dict_post_hook(_not_missed)

    def set_context_parallel_group(
        self, cp_group, cp_global_ranks, cp_stream, cp_comm_type: str = "p2p"
    ) -> None:
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        pad_between_seqs: bool | None = None,  # whatever it says, the two kinds of cu_seqlens do
    ) -> Tensor:
        """[s, b, h, d], [s, b, g, d] twice -> [s, b, h*d]; "thd": [t, h, d] -> [t, h*d]."""
        assert key_layer.shape[-2] == value_layer.shape[-2] == self.groups
        size = 1 if self.cp_group is None else dist.get_world_size(self.cp_group)
        rank = 0 if self.cp_group is None else dist.get_rank(self.cp_group)
        if qkv_format == "thd":
            _check_packed(
                attn_mask_type, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, max_seqlen_q, size
            )
            assert cu_seqlens_q is not None
            starts = cu_seqlens_q.tolist()
            q, k, v = (x.unsqueeze(1) for x in (query_layer, key_layer, value_layer))
        else:
            assert attn_mask_type == "causal", attn_mask_type
            starts = [0, size * query_layer.shape[0]]
            q, k, v = query_layer, key_layer, value_layer
        here = positions(starts, rank, size).to(q.device)
        everywhere = here
        if size > 1:
            # Not before the stand-in is there.
            from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

            k, v = (gather_from_sequence_parallel_region(x, group=self.cp_group) for x in (k, v))
            everywhere = torch.cat([positions(starts, r, size) for r in range(size)]).to(q.device)
        out = self._attend(q, k, v, here, everywhere)
        return out.flatten(1) if qkv_format == "thd" else out.flatten(2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, here: Tensor, everywhere: Tensor) -> Tensor:
        """The product with all keys, of which each query may see the earlier ones of its own."""
        repeats = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
        (sequence_q, place_q), (sequence_k, place_k) = here.unbind(1), everywhere.unbind(1)
        seen = (sequence_q[:, None] == sequence_k) & (place_q[:, None] >= place_k)
        scores = torch.einsum("qbhd,kbhd->bhqk", q, k).float() * self.scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(v.dtype)
        return torch.einsum("bhqk,kbhd->qbhd", weights, v)


def _not_missed(module: torch.nn.Module, incompatible_keys) -> None:
    """The library lets a checkpoint lack an attention's FP8 state; Megatron saves none."""
    missing = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if "core_attention._extra_state" not in key]


def positions(starts: list[int], rank: int, size: int) -> Tensor:
    """(sequence, place in it) of each position that a context-parallel rank has."""
    found = []
    for sequence, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        places = torch.arange(stop - start)
        if size > 1:
            chunks = places.view(2 * size, -1)
            places = torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))
        found.append(torch.stack((torch.full_like(places, sequence), places), dim=1))
    return torch.cat(found)


def _check_packed(mask_type, starts_q, starts_kv, padded, longest, context_size) -> None:
    """What the library asserts, or its kernels take for granted."""
    assert mask_type == "padding_causal", mask_type
    assert starts_q.dtype == starts_kv.dtype == torch.int32
    assert starts_q.shape == starts_kv.shape
    assert context_size == 1 or padded is not None, "context parallelism wants the padded starts"
    assert longest >= starts_q.diff().max()


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """The fused kernel: sines, cosines and the rotation in FP32, the result rounded once.

    Args:
        freqs: FP32 angles, [positions, 1, 1, d]; for "sbhd" those of this rank's positions, for
            "thd" those of the longest sequence.
    """
    assert fused and not interleaved, "not built here"
    assert freqs.dtype == torch.float32 and freqs.shape[-1] == t.shape[-1]
    if tensor_format == "thd":
        assert cu_seqlens is not None
        places = positions(cu_seqlens.tolist(), cp_rank, cp_size)[:, 1].to(freqs.device)
        angles = freqs[places].squeeze(1)
    else:
        angles = freqs[: t.shape[0]]
    wide = t.float()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * angles.cos() + turned * angles.sin()).to(t.dtype)
