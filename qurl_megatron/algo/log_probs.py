"""Log-probs and entropies of a vocabulary that is split over ranks, in the logits' own memory.

The logits are the largest tensor of the step, so they are neither gathered nor copied whole to
float32. Both directions walk over chunks of tokens through a small float32 scratch; the backward
pass recomputes the softmax and writes the gradient over the logits, which nobody needs any more.
On a GPU with Triton, ``algo.fused_vocabulary`` does this instead, and needs no scratch.

Shapes: T = tokens, v = this rank's slice of the vocabulary, C = tokens of one chunk,
n = real (not padding) columns of the slice.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from qurl_megatron.kit.fused import has_kernels_for

# Bytes of one float32 scratch buffer. On a CPU it should stay in a core's own cache; on a GPU it
# should be large enough to hide the launches.
SCRATCH_BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}

# exp(-60) = 9e-27 vanishes in a float32 sum of at least 1, so clamping there changes no result. It
# keeps 0 * inf = nan out of the entropy of columns masked with -inf, and exp() out of the subnormal
# range, where it is far slower on a CPU.
FLOOR = -60.0
# Stands for the maximum of a shard that has no finite logit, so that -inf - max stays -inf.
LOWEST = -1e30


def token_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``log softmax(logits / temperature)[t, targets[t]]`` and the entropy of each distribution.

    Args:
        logits: this rank's slice of the logits, [T, v]; rank r owns ids [r*v, (r+1)*v).
            The backward pass writes the gradient over them, unless they are a leaf or a view of
            one; pass a clone if they are read after it, or saved by the operation before.
        targets: global token ids, [T], equal on every rank. An id outside the vocabulary gives nan.
        group: tensor-parallel group, or None when the vocabulary is whole.
        temperature: the sampling temperature the rollout engine used.
        vocab_size: real size of a vocabulary that was padded to a multiple of the group; columns
            beyond it take no part and get zero gradient. None: nothing is padded.

    Returns:
        [T] float32 log-probs and [T] float32 entropies in nats, equal on every rank and
        differentiable in ``logits``. The forward pass has two collectives, the backward pass none.
    """
    assert logits.ndim == 2 and targets.shape == logits.shape[:1], (logits.shape, targets.shape)
    shard = _Shard.of(logits.shape[1], group, vocab_size)
    return _TokenLogProbs.apply(logits, targets, shard, temperature)


@dataclass(frozen=True)
class _Shard:
    """Which ids of the vocabulary this rank holds."""

    first: int  # global id of column 0
    columns: int  # n: columns that are not padding
    vocab_size: int
    group: dist.ProcessGroup | None  # None: no one to talk to

    @staticmethod
    def of(width: int, group: dist.ProcessGroup | None, vocab_size: int | None) -> "_Shard":
        world, rank = 1, 0
        if group is not None:
            world, rank = dist.get_world_size(group), dist.get_rank(group)
        size = width * world if vocab_size is None else vocab_size
        assert 0 < size <= width * world, (
            f"vocab_size {size} does not fit in {world} x {width} columns"
        )
        first = rank * width
        columns = min(max(size - first, 0), width)
        return _Shard(first, columns, size, group if world > 1 else None)

    def locate(self, targets_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the column of each target, [T, 1], and whether it is on this rank, [T]."""
        column_T = targets_T - self.first
        mine_T = (column_T >= 0) & (column_T < self.columns)
        return column_T.clamp(0, max(self.columns - 1, 0))[:, None], mine_T

    def all_reduce(self, x: Tensor, op: dist.ReduceOp) -> None:
        if self.group is not None:
            dist.all_reduce(x, op=op, group=self.group)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_Tv, targets_T, shard, temperature):
        max_T, sums_3T = _shard_sums(logits_Tv, targets_T, shard, temperature)
        if len(max_T):  # an empty batch is empty on every rank, so all of them skip
            # Each shard has summed relative to its own maximum: one pass over the logits is enough.
            own_max_T = max_T.clone()
            shard.all_reduce(max_T, dist.ReduceOp.MAX)
            _shift(sums_3T, (own_max_T - max_T) / temperature, shard.locate(targets_T)[1])
            shard.all_reduce(sums_3T, dist.ReduceOp.SUM)
        sum_T, target_T, moment_T = sums_3T
        log_sum_T = sum_T.log()
        log_prob_T = target_T - log_sum_T
        log_prob_T.masked_fill_((targets_T < 0) | (targets_T >= shard.vocab_size), torch.nan)
        entropy_T = log_sum_T - moment_T / sum_T

        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits_Tv, targets_T, max_T, sum_T, entropy_T)
        ctx.shard, ctx.temperature = shard, temperature
        ctx.expendable, ctx.consumed = _is_expendable(logits_Tv), False
        return log_prob_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_prob_T, grad_entropy_T):
        if ctx.consumed:
            raise RuntimeError(
                "token_log_probs: second backward pass, but the first one wrote the gradient over "
                "the logits; call it anew for each pass"
            )
        nothing = (None,) * 3
        if not ctx.needs_input_grad[0] or (grad_log_prob_T is None and grad_entropy_T is None):
            return None, *nothing
        logits_Tv, *saved = ctx.saved_tensors
        if ctx.expendable:
            # detach() shares the version counter, so anything else that saved the logits for its
            # own backward pass raises instead of reading the gradient.
            grad_Tv = logits_Tv.detach()
            ctx.consumed = True
        else:
            grad_Tv = torch.empty_like(logits_Tv, memory_format=torch.contiguous_format)
        targets_T, max_T, sum_T, entropy_T = saved
        _write_gradient(
            *(grad_Tv, logits_Tv, targets_T, max_T, sum_T, entropy_T),
            *(grad_log_prob_T, grad_entropy_T, ctx.shard, ctx.temperature),
        )
        return grad_Tv, *nothing


def _is_expendable(logits: Tensor) -> bool:
    """Return whether logits may be overwritten: no parameter, and no two elements in one place."""
    base = logits if logits._base is None else logits._base
    overlaps = any(
        step == 0 and size > 1 for step, size in zip(logits.stride(), logits.shape, strict=True)
    )
    return not logits.is_leaf and not base.is_leaf and not overlaps


def _shard_sums(
    logits_Tv: Tensor, targets_T: Tensor, shard: _Shard, temperature: float
) -> tuple[Tensor, Tensor]:
    """This shard's maximum, [T], and with z = (logit - maximum) / temperature: sum exp z, z of the
    target (0 where another rank holds it), and sum z exp z, [3, T]."""
    if has_kernels_for(logits_Tv):
        from qurl_megatron.algo import fused_vocabulary as vocabulary  # imports triton

        return vocabulary.shard_sums(logits_Tv, targets_T, shard.first, shard.columns, temperature)
    T = len(logits_Tv)
    max_T = torch.full([T], LOWEST, device=logits_Tv.device)
    sums_3T = torch.zeros(3, T, device=logits_Tv.device)
    column_T1, mine_T = shard.locate(targets_T)
    for rows, z_Cn, exp_Cn in _chunks(logits_Tv, shard.columns):
        z_Cn.copy_(logits_Tv[rows, : shard.columns])
        max_C = torch.amax(z_Cn, 1).clamp_(min=LOWEST)
        z_Cn.sub_(max_C[:, None])
        if temperature != 1.0:
            z_Cn.div_(temperature)
        target_C = z_Cn.gather(1, column_T1[rows]).squeeze(1)
        z_Cn.clamp_(min=FLOOR)
        torch.exp(z_Cn, out=exp_Cn)
        max_T[rows] = max_C
        sums_3T[0, rows] = exp_Cn.sum(1)
        sums_3T[1, rows] = torch.where(mine_T[rows], target_C, 0.0)
        sums_3T[2, rows] = exp_Cn.mul_(z_Cn).sum(1)
    return max_T, sums_3T


def _shift(sums_3T: Tensor, shift_T: Tensor, mine_T: Tensor) -> None:
    """Make the sums relative to a maximum that is higher by ``-shift_T``, in place."""
    sum_T, target_T, moment_T = sums_3T
    target_T += torch.where(mine_T, shift_T, 0.0)
    shift_T = shift_T.clamp(min=FLOOR)
    moment_T += shift_T * sum_T
    sums_3T[::2] *= shift_T.exp()


def _write_gradient(
    grad_Tv: Tensor,
    logits_Tv: Tensor,
    targets_T: Tensor,
    max_T: Tensor,
    sum_T: Tensor,
    entropy_T: Tensor,
    grad_log_prob_T: Tensor | None,
    grad_entropy_T: Tensor | None,
    shard: _Shard,
    temperature: float,
) -> None:
    """d(loss)/d(logits), into a tensor that may be the logits themselves.

    With g and h the gradients of log-prob and entropy, p the softmax and H the entropy, it is
    ``(g (onehot - p) - h p (log p + H)) / temperature``; grouped as ``p (a + b z)`` it needs
    p = exp(z) / sum only once and the division by the sum only per token.
    """
    g_T = torch.zeros_like(sum_T) if grad_log_prob_T is None else grad_log_prob_T.float()
    scale_T = 1 / (sum_T * temperature)
    a_T, b_T = -g_T * scale_T, None
    if grad_entropy_T is not None:
        b_T = -grad_entropy_T.float() * scale_T
        a_T = a_T + b_T * (entropy_T - sum_T.log())
    column_T1, mine_T = shard.locate(targets_T)
    onehot_T1 = torch.where(mine_T, g_T / temperature, 0.0)[:, None]
    if has_kernels_for(logits_Tv):
        from qurl_megatron.algo import fused_vocabulary as vocabulary  # imports triton

        vocabulary.write_gradient(
            *(grad_Tv, logits_Tv, column_T1, onehot_T1, max_T, a_T, b_T),
            *(shard.columns, temperature),
        )
        return

    for rows, z_Cn, exp_Cn in _chunks(logits_Tv, shard.columns, buffers=1 if b_T is None else 2):
        z_Cn.copy_(logits_Tv[rows, : shard.columns])
        z_Cn.sub_(max_T[rows, None])
        if temperature != 1.0:
            z_Cn.div_(temperature)
        z_Cn.clamp_(min=FLOOR)
        if b_T is None:
            z_Cn.exp_().mul_(a_T[rows, None])
        else:
            torch.exp(z_Cn, out=exp_Cn)
            z_Cn.mul_(b_T[rows, None]).add_(a_T[rows, None]).mul_(exp_Cn)
        z_Cn.scatter_add_(1, column_T1[rows], onehot_T1[rows])
        grad_Tv[rows, : shard.columns].copy_(z_Cn)
    grad_Tv[:, shard.columns :] = 0


def _chunks(logits_Tv: Tensor, columns: int, buffers: int = 2):
    """Yield slices of tokens, each with float32 buffers [C, columns] that are used again."""
    T = len(logits_Tv)
    if T == 0 or columns == 0:
        return
    device = logits_Tv.device
    budget = SCRATCH_BYTES.get(device.type, SCRATCH_BYTES["cpu"])
    step = min(T, max(1, budget // (4 * columns)))
    scratch = torch.empty(buffers, step, columns, device=device)
    for start in range(0, T, step):
        stop = min(start + step, T)
        views = [buffer[: stop - start] for buffer in scratch]
        yield slice(start, stop), views[0], views[-1]
