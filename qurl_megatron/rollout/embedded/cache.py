"""Keys and values of the running sequences: row r of the batch owns row r of the cache.

The running sequences always fill rows 0..B-1 (a finished one is replaced by the last), so attention
reads plain slices and needs no gather. One flat buffer is viewed as [rows, length]; when a longer
request comes, the view is cut anew into fewer, longer rows. Tokens and log-probs lie in the same grid.

The price: every row is as long as the longest request, and a step reads every row up to the longest
live prefix. Rollout batches are nearly uniform, so neither is worth page tables here.

Shapes: R rows, L positions per row, D head dimension, B running rows; keys before values along heads.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qurl_megatron.rollout.embedded.arch import Arch

ROUND = 64  # row lengths are multiples of this, so that slightly longer requests need no new cut


class Cache:
    @torch.inference_mode()
    def __init__(
        self, arch: Arch, dtype: torch.dtype, device: torch.device, gigabytes: float, max_rows: int
    ) -> None:
        per_token = arch.layers * 2 * arch.kv_heads * arch.head_dim * dtype.itemsize
        self.capacity = int(gigabytes * 2**30 / per_token) // ROUND * ROUND
        self.max_rows = max_rows
        self._heads, self._kv_heads, self._dim = arch.heads, arch.kv_heads, arch.head_dim
        # Untouched pages of the flat buffers cost no memory on CPU.
        self._layers_flat = [
            torch.empty(self.capacity * 2 * arch.kv_heads * arch.head_dim, dtype=dtype, device=device)
            for _ in range(arch.layers)
        ]
        self._tokens_flat = torch.empty(self.capacity, dtype=torch.int64, device=device)
        self._log_probs_flat = torch.empty(self.capacity, dtype=torch.float32, device=device)
        self.length = 0
        self.cut(ROUND, live_rows=0)

    @property
    def rows(self) -> int:
        return self.rows_at(self.length)

    def rows_at(self, length: int) -> int:
        return min(self.max_rows, self.capacity // _rounded(length))

    @torch.inference_mode()
    def cut(self, length: int, live_rows: int) -> None:
        """Lay the buffers out as rows of at least ``length``; the live rows keep what they hold."""
        live = [grid[:live_rows].clone() for grid in self._grids()] if live_rows else []
        old_length, self.length = self.length, _rounded(length)
        rows = self.rows
        shape = (rows, 2 * self._kv_heads, self.length, self._dim)
        size = rows * self.length
        self.layers = [
            flat[: size * 2 * self._kv_heads * self._dim].view(shape) for flat in self._layers_flat
        ]
        self.tokens = self._tokens_flat[:size].view(rows, self.length)
        self.log_probs = self._log_probs_flat[:size].view(rows, self.length)
        kept = min(old_length, self.length)
        for grid, old in zip(self._grids(), live, strict=False):
            if grid.dim() == 4:
                grid[:live_rows, :, :kept] = old[:, :, :kept]
            else:
                grid[:live_rows, :kept] = old[:, :kept]

    def move(self, source: int, target: int, length: int) -> None:
        """Row ``target`` becomes a copy of the first ``length`` positions of row ``source``."""
        self.spread(torch.tensor([source]), torch.tensor([target]), length)

    def spread(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy rows ``source`` onto rows ``target`` (disjoint), up to ``length`` positions."""
        for layer in self.layers:
            layer[target, :, :length] = layer[source, :, :length]
        for grid in (self.tokens, self.log_probs):
            grid[target, :length] = grid[source, :length]

    def attend_prefill(self, rows_P: Tensor, prompt_length: int):
        """Causal attention of whole right-padded prompts, which also fills their rows.

        Padding lies behind every real token, so the causal mask hides it; what it leaves in the cache
        is overwritten by the tokens that are generated there.
        """
        count = len(rows_P)

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            q = q.view(count, prompt_length, self._heads, self._dim).transpose(1, 2)
            kv = kv.view(count, prompt_length, -1, self._dim).transpose(1, 2)
            self.layers[layer][rows_P, :, :prompt_length] = kv
            mixed = scaled_dot_product_attention(
                q, kv[:, : self._kv_heads], kv[:, self._kv_heads :], is_causal=True, enable_gqa=True
            )
            return mixed.transpose(1, 2).reshape(count * prompt_length, -1)

        return attend

    def attend_decode(self, position_B: Tensor, longest: int):
        """Attention of one new token per row at ``position_B`` to its row's prefix, itself included.

        Args:
            position_B: where each row's new key and value go.
            longest: largest position plus one.
        """
        batch, kv_heads = len(position_B), self._kv_heads
        row_B = torch.arange(batch, device=position_B.device)
        ahead_BL = torch.arange(longest, device=position_B.device) > position_B[:, None]
        mask = torch.zeros(ahead_BL.shape, dtype=self.layers[0].dtype, device=position_B.device)
        mask = mask.masked_fill_(ahead_BL, float("-inf"))[:, None, None]

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            self.layers[layer][row_B, :, position_B] = kv
            live = self.layers[layer][:batch, :, :longest]
            # The query heads of one group are the "queries" of their key head: nothing is repeated.
            mixed = scaled_dot_product_attention(
                q.reshape(batch, kv_heads, -1, self._dim),
                live[:, :kv_heads],
                live[:, kv_heads:],
                attn_mask=mask,
            )
            return mixed.reshape(batch, -1)

        return attend

    def _grids(self) -> list[Tensor]:
        return [*self.layers, self.tokens, self.log_probs]


def _rounded(length: int) -> int:
    return -(-length // ROUND) * ROUND
