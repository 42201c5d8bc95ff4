"""Log-probs and entropy over a slice of the vocabulary: one pass forward, one backward.

Forward, one program walks over the logits of one token, a block of columns at a time. Maximum and
sums are online: where a block has a higher maximum, the sums so far are made relative to it. Each
lane sums its own columns and all lanes are added last, in an order that depends on nothing but the
width, so results repeat to the bit. Backward, a program reads one block and writes its gradient,
which may take the block's own place.

On a GPU ``exp`` is the hardware's ``ex2.approx`` of a rounded product: off by 2**-22 + |z| 2**-24
of its value at most. Terms are weighted by their probability, so a log-prob is off by 2**-22 plus
2**-24 times the mean |z|, in addition to torch's error.

Shapes: T = tokens, v = this rank's slice of the vocabulary, n = its columns that are not padding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl_megatron.algo.log_probs import FLOOR, LOWEST

BLOCK = 4096  # columns at a time: 16 to a thread
WARPS = 8


def shard_sums(
    logits_Tv: Tensor, targets_T: Tensor, first: int, columns: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """One shard's part of the softmax.

    Args:
        logits_Tv: [T, v] of any strides, not empty.
        targets_T: global token ids, [T].
        first: global id of column 0.
        columns: n.

    Returns:
        The shard's maximum, [T], and [3, T], with z = (logit - maximum) / temperature: sum exp z,
        z of the target (0 where another shard holds it), sum z exp z.
    """
    T = len(logits_Tv)
    max_T = torch.empty(T, device=logits_Tv.device)
    sums_3T = torch.empty(3, T, device=logits_Tv.device)
    with torch.cuda.device_of(logits_Tv):
        sum_token[T,](
            *(logits_Tv, targets_T, max_T, sums_3T, T, first, columns),
            *(*logits_Tv.stride(), targets_T.stride(0), 1 / temperature, FLOOR, LOWEST),
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return max_T, sums_3T


def write_gradient(
    grad_Tv: Tensor,
    logits_Tv: Tensor,
    column_T: Tensor,
    onehot_T: Tensor,
    max_T: Tensor,
    a_T: Tensor,
    b_T: Tensor | None,
    columns: int,
    temperature: float,
) -> None:
    """``(a + b z) exp z``, and ``onehot`` more in the target's column; 0 in padding.

    Args:
        grad_Tv: [T, v], written; may be the logits.
        column_T: the target's column; onehot is 0 where another shard holds it.
        b_T: None for 0.
    """
    T, width = logits_Tv.shape
    b_T = torch.zeros_like(a_T) if b_T is None else b_T
    with torch.cuda.device_of(logits_Tv):
        gradient_block[T, triton.cdiv(width, BLOCK)](
            *(grad_Tv, logits_Tv, column_T.contiguous(), onehot_T.contiguous()),
            *(max_T, a_T.contiguous(), b_T.contiguous(), columns, width),
            *(*grad_Tv.stride(), *logits_Tv.stride(), 1 / temperature, FLOOR),
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    # Autograd does not see a kernel's writes; whoever saved the logits must find out.
    torch.autograd.graph.increment_version(grad_Tv)


@triton.jit
def sum_token(
    logits,
    targets,
    highest,
    sums,
    tokens,
    first,
    columns,
    row_step,
    column_step,
    target_step,
    inverse_temperature,
    floor,
    lowest,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = logits + row * row_step
    top = lowest
    sum_B = tl.zeros([BLOCK], tl.float32)
    moment_B = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        in_range = column < columns
        x = tl.load(token + column.to(tl.int64) * column_step, mask=in_range, other=-float("inf"))
        x = x.to(tl.float32)
        higher = tl.maximum(top, tl.max(x, axis=0))
        shift = tl.maximum((top - higher) * inverse_temperature, floor)
        fade = tl.exp(shift)
        z = _position(x, higher, inverse_temperature, floor)
        exp_z = tl.where(in_range, tl.exp(z), 0.0)
        moment_B = (moment_B + shift * sum_B) * fade + z * exp_z
        sum_B = sum_B * fade + exp_z
        top = higher
    target = tl.load(targets + row * target_step).to(tl.int64) - first
    owned = (target >= 0) & (target < columns)
    x = tl.load(token + target * column_step, mask=owned, other=0.0).to(tl.float32)
    tl.store(highest + row, top)
    tl.store(sums + row, tl.sum(sum_B, axis=0))
    tl.store(sums + tokens + row, tl.where(owned, (x - top) * inverse_temperature, 0.0))
    tl.store(sums + 2 * tokens + row, tl.sum(moment_B, axis=0))


@triton.jit
def gradient_block(
    grad,
    logits,
    target_column,
    onehot,
    highest,
    a,
    b,
    columns,
    width,
    grad_row_step,
    grad_column_step,
    row_step,
    column_step,
    inverse_temperature,
    floor,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_range = column < columns
    x = tl.load(logits + row * row_step + column * column_step, mask=in_range, other=-float("inf"))
    z = _position(x.to(tl.float32), tl.load(highest + row), inverse_temperature, floor)
    gradient = (tl.load(a + row) + tl.load(b + row) * z) * tl.exp(z)
    is_target = column == tl.load(target_column + row)
    gradient = tl.where(is_target, gradient + tl.load(onehot + row), gradient)
    gradient = tl.where(in_range, gradient, 0.0).to(grad.dtype.element_ty)
    place = grad + row * grad_row_step + column * grad_column_step
    tl.store(place, gradient, mask=column < width)


@triton.jit
def _position(x, top, inverse_temperature, floor):
    """z, at least ``floor``. A comparison, because a GPU's maximum would drop nan."""
    z = (x - top) * inverse_temperature
    return tl.where(z < floor, floor, z)
