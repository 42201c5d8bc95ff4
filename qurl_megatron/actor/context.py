"""A sequence split over context-parallel ranks: who has which positions, and how parts are joined.

Of n ranks, each gets two of 2n equal chunks of every sequence, rank r the chunks r and 2n-1-r:
the cost of a position in causal attention grows with its place, and an early chunk and a late one
make up for each other. This zig-zag is Megatron's; its rotary embeddings and Transformer Engine's
attention expect it.

Only the model itself sees parts. Losses and metrics get whole sequences, joined from small things
such as log-probs, so that they need not know how a sequence was split.

Shapes: B = rows, S = length of the whole, s = S/n = this rank's part.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.actor.megatron import Axis
from qurl_megatron.data.pack import TokenBatch


class Run(NamedTuple):
    """Neighbouring positions of one sequence that a rank has; all three are places in S."""

    sequence: int  # where their sequence begins
    first: int
    stop: int


@dataclass(frozen=True)
class ContextPart:
    """This rank's part of a batch."""

    axis: Axis
    starts: tuple[int, ...]  # of the sequences that follow each other along S, and their end

    @staticmethod
    def of(axis: Axis, batch: TokenBatch) -> "ContextPart":
        return ContextPart(axis, batch.starts or (0, batch.input_ids.shape[1]))

    @property
    def runs(self) -> list[Run]:
        """This rank's positions, in order."""
        return zigzag(self.starts, self.axis.rank, self.axis.size)

    def cut(self, whole: Tensor) -> Tensor:
        """[B, S, ...] -> this rank's [B, s, ...]."""
        if self.axis.size == 1:
            return whole
        by_rank, _ = _places(self.starts, self.axis.size, whole.device)
        return whole.index_select(1, by_rank[self.axis.rank])

    def join(self, part: Tensor) -> Tensor:
        """Every rank's [B, s, ...] -> [B, S, ...], for a loss that all ranks compute alike.

        Such a loss has the same gradient everywhere, and each rank takes its own part of it. So
        each adds the gradient of its positions to the weights, and Megatron's sum over the ranks is
        the gradient of the one loss: it must not be divided by their number.
        """
        return part if self.axis.size == 1 else _Join.apply(part, self, False)

    def gather(self, part: Tensor) -> Tensor:
        """Join parts that each rank uses differently, as attention uses keys and values.

        The gradient is the sum of the ranks' gradients.
        """
        return part if self.axis.size == 1 else _Join.apply(part, self, True)


def zigzag(starts: tuple[int, ...], rank: int, size: int) -> list[Run]:
    """Return the runs that one of ``size`` ranks has of each sequence between ``starts``."""
    if size == 1:
        return [Run(begin, begin, end) for begin, end in zip(starts, starts[1:], strict=False)]
    runs = []
    for begin, end in zip(starts, starts[1:], strict=False):
        chunk, remainder = divmod(end - begin, 2 * size)
        assert remainder == 0, f"{end - begin} positions do not divide into {2 * size} chunks"
        for index in (rank, 2 * size - 1 - rank):
            runs.append(Run(begin, begin + index * chunk, begin + (index + 1) * chunk))
    return runs


@lru_cache(maxsize=64)  # every layer asks
def _places(
    starts: tuple[int, ...], size: int, device: torch.device
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return each rank's places in S, [s] each; and the index of each place among all these, [S].

    Made on the CPU: on a GPU, each of the many small runs would be a kernel.
    """
    by_rank = [
        torch.cat([torch.arange(r.first, r.stop, device="cpu") for r in zigzag(starts, rank, size)])
        for rank in range(size)
    ]
    return tuple(p.to(device) for p in by_rank), torch.cat(by_rank).argsort().to(device)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: Tensor, place: ContextPart, add_gradients: bool) -> Tensor:
        ctx.place, ctx.add_gradients = place, add_gradients
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(place.axis.size)]
        dist.all_gather(parts, part, group=place.axis.group)
        _, order = _places(place.starts, place.axis.size, part.device)
        return torch.cat(parts, 1).index_select(1, order)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.add_gradients:
            grad = grad.clone(memory_format=torch.contiguous_format)  # others may read it as well
            dist.all_reduce(grad, group=ctx.place.axis.group)
        return ctx.place.cut(grad), None, None
