"""Keys and values of the running sequences: row r of the batch owns row r of the cache.

The running sequences always fill rows 0..B-1 (the last one replaces one that finished), so
attention reads plain slices and needs no gather. One flat buffer is viewed as [rows, length]; for a
longer request it is cut into fewer, longer rows. Tokens, their log-probs and the numbers of their
experts have the same rows and positions.

The price: every row is as long as the longest request, and a step reads every row up to the longest
live prefix. Rollout batches are nearly uniform, so neither is worth page tables here.

Keys are stored transposed, positions along the fast axis: a decode step multiplies a few query rows
by every key, and with [D, L] both products of attention stream contiguous memory. On CPU this takes
half the time of scaled_dot_product_attention, which tiles per row and head.

Shapes: R rows, L positions per row, D head dimension, B running rows, P prompts of one prefill, G
query heads per key head; x = rows x key heads.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qurl_megatron.tensors.arch import Arch
from qurl_megatron.types import routes_dtype

ROUND = 64  # row lengths are multiples of it, so that slightly longer requests need no new cut


class Cache:
    @torch.inference_mode()
    def __init__(
        self, arch: Arch, dtype: torch.dtype, device: torch.device, gigabytes: float, max_rows: int
    ) -> None:
        token_bytes = 2 * arch.num_layers * arch.kv_heads * arch.head_dim * dtype.itemsize
        self.capacity = int(gigabytes * 2**30 / token_bytes) // ROUND * ROUND
        self.max_rows = max_rows
        self._heads, self._kv_heads, self._dim = arch.heads, arch.kv_heads, arch.head_dim
        # Untouched pages of the flat buffers cost no memory on CPU.
        numbers = self.capacity * arch.kv_heads * arch.head_dim
        self._keys_flat, self._values_flat = (
            [torch.empty(numbers, dtype=dtype, device=device) for _ in range(arch.num_layers)]
            for _ in range(2)
        )
        self._tokens_flat = torch.empty(self.capacity, dtype=torch.int64, device=device)
        self._log_probs_flat = torch.empty(self.capacity, dtype=torch.float32, device=device)
        self._choices, width = 0, torch.uint8  # experts of a token, in all layers together
        if arch.experts:
            self._choices = arch.num_layers * arch.experts.top_k
            width = getattr(torch, routes_dtype(arch.experts.count))
        choices = self.capacity * self._choices
        self._experts_flat = torch.empty(choices, dtype=width, device=device)
        self.length = 0
        self._reached = 0
        self.cut(ROUND, live_rows=0)

    def rows_at(self, length: int) -> int:
        return min(self.max_rows, self.capacity // _rounded(length))

    @torch.inference_mode()
    def cut(self, length: int, live_rows: int) -> None:
        """Lay the buffers out as rows of at least ``length``; live rows keep their contents."""
        stop = min(self.length, _rounded(length))
        live = [grid[:live_rows, ..., :stop].clone() for grid in self._grids()] if live_rows else []
        self.length = _rounded(length)
        rows, heads, dim = self.rows_at(self.length), self._kv_heads, self._dim

        def view(flat: Tensor, *shape: int) -> Tensor:
            return flat[: math.prod(shape)].view(shape)

        self.keys = [view(flat, rows, heads, dim, self.length) for flat in self._keys_flat]
        self.values = [view(flat, rows, heads, self.length, dim) for flat in self._values_flat]
        self.tokens = view(self._tokens_flat, rows, self.length)
        self.log_probs = view(self._log_probs_flat, rows, self.length)
        self.experts = view(self._experts_flat, rows, self._choices, self.length)
        for grid, old in zip(self._grids(), live, strict=False):
            grid[:live_rows, ..., :stop] = old

    def reach(self, live_rows: int, new_rows: int, length: int) -> None:
        """Make positions below ``length`` readable, for live rows and the new ones after them.

        Attention multiplies values behind a row's end by zero, and 0 * nan is nan: what it reads
        must not come from unwritten memory, or from broken weights.
        """
        before = self._reached if live_rows else 0
        if new_rows == 0 and length <= before:
            return
        self._reached = max(before, _rounded(length))
        for grid in self._attention_grids():
            if self._reached > before:
                grid[:live_rows, ..., before : self._reached] = 0
            grid[live_rows : live_rows + new_rows, ..., : self._reached] = 0

    def spread(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy rows ``source`` onto rows ``target`` (disjoint), up to ``length`` positions."""
        for grid in self._grids():
            grid[target, ..., :length] = grid[source, ..., :length]

    def attend_prefill(self, rows_P: Tensor, prompt_length: int):
        """Return causal attention of whole right-padded prompts, which also fills their rows.

        Padding lies behind all real tokens, so the causal mask hides it; generated tokens overwrite
        its entries in the cache.
        """
        count = len(rows_P)

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            q = q.view(count, prompt_length, self._heads, self._dim).transpose(1, 2)
            kv = kv.view(count, prompt_length, -1, self._dim).transpose(1, 2)
            k, v = kv[:, : self._kv_heads], kv[:, self._kv_heads :]
            self.keys[layer][rows_P, :, :, :prompt_length] = k.transpose(2, 3)
            self.values[layer][rows_P, :, :prompt_length] = v
            mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return mixed.transpose(1, 2).reshape(count * prompt_length, -1)

        return attend

    def attend_decode(self, position_B: Tensor, longest: int):
        """Return attention of one new token per row to its row's prefix, itself included.

        Args:
            position_B: where each row's new key and value go.
            longest: largest position plus one; ``reach`` was called with it.
        """
        batch, heads, dim, dtype = len(position_B), self._kv_heads, self._dim, self.keys[0].dtype
        device, scale = position_B.device, dim**-0.5
        x = batch * heads
        row_x, position_x = torch.arange(x, device=device), position_B.repeat_interleave(heads)
        ahead_BL = torch.arange(longest, device=device) > position_B[:, None]
        mask_BL = torch.zeros(batch, longest, device=device).masked_fill_(ahead_BL, float("-inf"))
        mask_x1L = mask_BL.repeat_interleave(heads, dim=0)[:, None]

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            keys = self.keys[layer].flatten(0, 1)
            values = self.values[layer].flatten(0, 1)
            keys[row_x, :, position_x] = kv[:, :heads].reshape(x, dim)
            values[row_x, position_x] = kv[:, heads:].reshape(x, dim)
            # The query heads of one group share a product with their key head: none is repeated.
            q_xGD = q.reshape(x, -1, dim)
            score_xGL = _scores(q_xGD, keys[:x, :, :longest], scale, mask_x1L)
            weight_xGL = score_xGL.softmax(dim=-1).to(dtype)
            return torch.bmm(weight_xGL, values[:x, :longest]).view(batch, -1)

        return attend

    def _attention_grids(self) -> Iterator[Tensor]:
        """Yield keys and values as [R, heads, D, L]."""
        yield from self.keys
        for values in self.values:
            yield values.transpose(2, 3)

    def _grids(self) -> Iterator[Tensor]:
        """Yield everything that is laid out by row; positions come last."""
        yield from self._attention_grids()
        yield from (self.tokens, self.log_probs, self.experts)


def _scores(q_xGD: Tensor, key_xDL: Tensor, scale: float, mask_x1L: Tensor) -> Tensor:
    """Return ``q @ keys * scale + mask`` in float32."""
    if q_xGD.dtype is torch.float32:
        return torch.baddbmm(mask_x1L, q_xGD, key_xDL, alpha=scale)  # in one pass
    return torch.bmm(q_xGD, key_xDL).float().mul_(scale).add_(mask_x1L)


def _rounded(length: int) -> int:
    return -(-length // ROUND) * ROUND
