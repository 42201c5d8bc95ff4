"""Sampling whose noise is a pure function of (seed, position), and the log-probs of samples.

Token t of a sequence is drawn by inverting the cumulative distribution at ``uniform(seed, t)``: a
hash, not a generator with state. So the noise never depends on the rest of the batch, and a
sequence that was interrupted and resumed draws the same numbers.

The inversion works on two levels (blocks, then the tokens of one block), in float64. A float32
running sum over 150k tokens would lose the tail, and a float64 one over all tokens would cost more
than the model's head.

Shapes: B sequences, V vocabulary, N blocks of K tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128  # divides the common vocabulary sizes, which then need no padding
GREEDY = 1e-6  # SGLang, too, calls temperatures below this greedy


@dataclass
class SamplingState:
    """Per-sequence sampling parameters as tensors of length B."""

    temperature_B: Tensor  # float32; 1 for greedy rows, whose log-probs are untempered
    greedy_B: Tensor  # bool
    seed_B: Tensor  # int64
    position_B: Tensor  # int64: index of the token to be drawn
    top_p_B: Tensor  # float32
    top_k_B: Tensor  # int64; V or more: off
    any_sampled: bool
    any_filtered: bool


def sample(logits_BV: Tensor, state: SamplingState) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Returns:
        Tokens [B] int64 and their log-probs [B] float32: ``log_softmax(logits / temperature)`` over
        the whole vocabulary, even if top_p or top_k (meant for evaluation) narrowed the choice.
    """
    scaled_BV = logits_BV / state.temperature_B[:, None]  # float32, whatever the logits are
    peak_B, best_B = scaled_BV.max(dim=-1)
    weight_BV = (scaled_BV - peak_B[:, None]).exp_()
    blocks_BNK, running_BN = blocks(weight_BV)
    total_B = running_BN[:, -1]
    token_B = best_B
    if state.any_sampled:
        if state.any_filtered:
            blocks_BNK, running_BN = blocks(_filtered(weight_BV, state))
        drawn_B = draw(blocks_BNK, running_BN, uniform(state.seed_B, state.position_B))
        drawn_B = drawn_B.clamp_(max=logits_BV.shape[1] - 1)  # only nan gets beyond it
        token_B = torch.where(state.greedy_B, best_B, drawn_B)
    chosen_B = scaled_BV.gather(1, token_B[:, None])[:, 0]
    return token_B, (chosen_B.double() - peak_B.double() - total_B.log()).float()


def blocks(weight_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights in blocks, and the running sum over blocks in float64."""
    batch, vocab = weight_BV.shape
    weight_BNK = pad(weight_BV, (0, -vocab % BLOCK)).view(batch, -1, BLOCK)
    # Within one short block float32 is enough.
    return weight_BNK, weight_BNK.sum(dim=-1).double().cumsum(dim=-1)


def draw(weight_BNK: Tensor, running_BN: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the token whose slice of the running sum holds ``uniform * total``; weight > 0."""
    target_B, block_B = _first_above(running_BN, uniform_B * running_BN[:, -1])
    before_B = pad(running_BN, (1, 0)).gather(1, block_B[:, None])[:, 0]
    inside_BK = weight_BNK[torch.arange(len(block_B), device=block_B.device), block_B]
    _, offset_B = _first_above(inside_BK.double().cumsum(dim=-1), target_B - before_B)
    return block_B * BLOCK + offset_B


def _first_above(running_BN: Tensor, target_B: Tensor) -> tuple[Tensor, Tensor]:
    # Rounding can push the target onto the total, where nothing lies above it.
    below_total_B = torch.nextafter(running_BN[:, -1], torch.zeros_like(target_B))
    target_B = torch.minimum(target_B, below_total_B).clamp_(min=0)
    above_B = torch.searchsorted(running_BN, target_B[:, None], right=True)[:, 0]
    return target_B, above_B.clamp_(max=running_BN.shape[1] - 1)


def _filtered(weight_BV: Tensor, state: SamplingState) -> Tensor:
    ranked_BV, order_BV = weight_BV.sort(dim=-1, descending=True)
    before_BV = ranked_BV.double().cumsum(dim=-1) - ranked_BV
    total_B1 = weight_BV.sum(dim=-1, keepdim=True, dtype=torch.float64)
    rank_V = torch.arange(weight_BV.shape[1], device=weight_BV.device)
    keep_BV = (before_BV < state.top_p_B[:, None] * total_B1) & (rank_V < state.top_k_B[:, None])
    keep_BV[:, 0] = True
    return torch.zeros_like(weight_BV).scatter_(1, order_BV, ranked_BV * keep_BV)


def uniform(seed_B: Tensor, position_B: Tensor) -> Tensor:
    """Return float64 [B] in [0, 1): SplitMix64 at a position of the stream of a seed."""
    bits_B = _mix(_mix(seed_B) + (position_B + 1) * _signed(0x9E3779B97F4A7C15))
    return _shift(bits_B, 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """Return SplitMix64's finalizer; int64 products wrap, as the algorithm needs."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right logically: torch's own shift keeps the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
