"""Attention over trees: prompts that are computed once, and the responses that follow them.

A branch attends to itself and to the prefix before it. The two parts are computed apart, each by
torch's fused kernel, which also returns the log-sum-exp, so the two merge exactly. So nothing is
masked, copied for each response or computed twice. In the backward pass, too, each part needs only
the merged result and the merged sum, as with context parallelism.

Branches of like length, and trees of like size, go through the kernel together.

Shapes: S = positions of the row, h = this rank's heads, g = its key/value groups, d = head size,
b = pieces that go through the kernel together, L = queries of each, M = keys of each.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from qurl_megatron.data.pack import TokenBatch
from qurl_megatron.data.trees import Tree


@dataclass
class TreeParams(PackedSeqParams):
    """What Megatron hands on to attention; all else takes the row for one sequence."""

    trees: tuple[Tree, ...] = ()

    @staticmethod
    def of(trees: tuple[Tree, ...]) -> "TreeParams":
        depth = max(tree.depth for tree in trees)
        return TreeParams(qkv_format="sbhd", max_seqlen_q=depth, max_seqlen_kv=depth, trees=trees)


@contextmanager
def rotated_by_place(gpt: GPTModel, batch: TokenBatch) -> Iterator[None]:
    """Inside, positions of a batch with trees are rotated by their place in the tree.

    Megatron counts from the beginning of a row.
    """
    if batch.trees is None:
        yield
        return
    places = batch.positions[0]
    hook = gpt.rotary_pos_emb.register_forward_hook(
        lambda _module, _arguments, angles: angles.index_select(0, places)
    )
    try:
        yield
    finally:
        hook.remove()


def tree_attention(
    query_Shd: Tensor, key_Sgd: Tensor, value_Sgd: Tensor, trees: tuple[Tree, ...], scale: float
) -> Tensor:
    """[S, h, d] of what each position attends to; zeros for those of no tree. Differentiable."""
    return _TreeAttention.apply(query_Shd, key_Sgd, value_Sgd, trees, scale)


@dataclass(frozen=True)
class _Calls:
    """Pieces of a row that go through the kernel together.

    Queries are padded to one length with the row's first position, whose results are dropped.
    """

    queries: Tensor  # [b * L]: places in the row
    kept: Tensor | None  # [b * L] bool: not padding; None where there is none
    keys: Tensor  # [b * M]; those of padding have no query that counts and sees them
    pieces: int
    causal: bool

    def of_queries(self, x: Tensor) -> Tensor:
        """[S, ...] -> [b, L, ...]"""
        return x.index_select(0, self.queries).unflatten(0, (self.pieces, -1))

    def of_keys(self, x_Sgd: Tensor, heads: int) -> Tensor:
        """[S, g, d] -> [b, h, M, d]"""
        x = x_Sgd.index_select(0, self.keys).unflatten(0, (self.pieces, -1))
        return x.repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2)

    @property
    def places(self) -> Tensor:
        return self.queries if self.kept is None else self.queries[self.kept]

    def drop(self, x: Tensor) -> Tensor:
        """[b, L, ...] -> those of ``places``."""
        x = x.flatten(0, 1)
        return x if self.kept is None else x[self.kept]


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, trees, scale) -> Tensor:
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        wide = torch.promote_types(query.dtype, torch.float32)
        log_sum = torch.zeros(query.shape[:2], dtype=wide)  # [S, h]
        within, before = _calls(trees)
        for calls in within:
            seen, total = _attend(calls, query, key, value, scale)
            out.index_copy_(0, calls.places, seen)
            log_sum.index_copy_(0, calls.places, total)
        for calls in before:
            seen, total = _attend(calls, query, key, value, scale)
            own = log_sum[calls.places]
            both = torch.logaddexp(own, total)
            # Weights that add up to 1: exp(own - both) has the rounding of large sums in it.
            weight = (own - total).sigmoid()[..., None]
            merged = torch.lerp(seen.to(weight.dtype), out[calls.places].to(weight.dtype), weight)
            out.index_copy_(0, calls.places, merged.to(out.dtype))
            log_sum.index_copy_(0, calls.places, both)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.trees, ctx.scale = trees, scale
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, log_sum = ctx.saved_tensors
        heads = query.shape[1]
        found = [torch.zeros_like(x) for x in (query, key, value)]
        within, before = _calls(ctx.trees)
        for calls in (*within, *before):
            d_out, sums = calls.of_queries(grad), calls.of_queries(log_sum)
            if calls.kept is not None:
                # A weight is exp(score - sum): padding's are zero.
                padding = ~calls.kept.view(calls.pieces, -1)
                d_out[padding], sums[padding] = 0.0, float("inf")
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                d_out.transpose(1, 2),
                calls.of_queries(query).transpose(1, 2),
                calls.of_keys(key, heads),
                calls.of_keys(value, heads),
                calls.of_queries(out).transpose(1, 2),
                sums.transpose(1, 2),
                0.0,
                calls.causal,
                scale=ctx.scale,
            )
            d_query, *d_keys = (part.transpose(1, 2) for part in parts)
            found[0].index_add_(0, calls.places, calls.drop(d_query))
            for whole, part in zip(found[1:], d_keys, strict=True):
                groups = part.unflatten(2, (whole.shape[1], -1)).sum(3)
                # A key's padding is the row's first position; it gets zeros.
                whole.index_add_(0, calls.keys, groups.flatten(0, 1))
        d_q, d_k, d_v = found
        return d_q, d_k, d_v, None, None


def _attend(
    calls: _Calls, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Results [n, h, d] and logarithms of sums [n, h] for the n places of ``calls``."""
    heads = query.shape[1]
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        calls.of_queries(query).transpose(1, 2),
        calls.of_keys(key, heads),
        calls.of_keys(value, heads),
        0.0,
        calls.causal,
        scale=scale,
    )
    return calls.drop(out.transpose(1, 2)), calls.drop(log_sum.transpose(1, 2))


@lru_cache(maxsize=64)  # every layer asks
def _calls(trees: tuple[Tree, ...]) -> tuple[list[_Calls], list[_Calls]]:
    """The kernel's calls within prefixes and branches, and those from branches to prefixes."""
    within: dict[tuple, list[range]] = {}
    before: dict[tuple, list[tuple[range, range]]] = {}
    for tree in trees:
        prefix = range(tree.start, tree.start + tree.prefix)
        if prefix:
            within.setdefault(("exact", len(prefix)), []).append(prefix)
            branches = range(prefix.stop, tree.stop)
            like = (len(prefix), _rounded(len(branches)))
            before.setdefault(like, []).append((branches, prefix))
        start = prefix.stop
        for count in tree.branches:
            branch = range(start, start + count)
            within.setdefault(("like", _rounded(count)), []).append(branch)
            start = branch.stop
    return (
        [_together(pieces, None) for pieces in within.values()],
        [_together([q for q, _ in p], [k for _, k in p]) for p in before.values()],
    )


def _together(queries: Sequence[range], keys: Sequence[range] | None) -> _Calls:
    """Calls of pieces with keys of one length each, or else with the queries' own."""
    longest = max(map(len, queries))
    padded = [[*piece, *[0] * (longest - len(piece))] for piece in queries]
    kept = torch.tensor([i < len(piece) for piece in queries for i in range(longest)])
    places = torch.tensor(padded).flatten()
    return _Calls(
        queries=places,
        kept=None if kept.all() else kept,
        keys=places if keys is None else torch.tensor([[*piece] for piece in keys]).flatten(),
        pieces=len(queries),
        causal=keys is None,
    )


def _rounded(count: int) -> int:
    """Lengths within a quarter of each other are alike, and all short ones."""
    step = max(16, 1 << max(0, count.bit_length() - 3))
    return -(-count // step) * step
