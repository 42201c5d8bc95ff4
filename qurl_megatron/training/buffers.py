"""Memory that a rank needs for a model it trains, from the shapes of its weights alone.

This lays out Megatron's buffer of gradients as megatron-core 0.16 does in
``core/distributed/param_and_grad_buffer.py``: parameters in reverse order, each beginning at a
multiple of 64 numbers, in buckets that end at a multiple of 128 and of the ranks that share the
optimizer. Weights lie in a buffer like it; masters and Adam's moments are a rank's share of every
bucket, less the padding. Tests hold all of it to the byte against models that are built.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from qurl_megatron.checkpoints import stage_ops
from qurl_megatron.config import ParallelConfig
from qurl_megatron.tensors.arch import Arch
from qurl_megatron.training.memory import Held

PARAMETER_STEP = 64  # numbers; with a distributed optimizer alone, like the next
BUCKET_STEP = 128
BUCKET = 40_000_000  # numbers at least, and
BUCKET_PER_RANK = 1_000_000  # for each rank that shares the data

# Megatron's modules register their parameters in this order, which differs from the ops' order.
ORDER = [
    *("input_layernorm", "linear_proj", "linear_qkv.weight", "linear_qkv.bias", "q_layernorm"),
    *("k_layernorm", "pre_mlp_layernorm", "mlp."),
]


@dataclass(frozen=True)
class Bucket:
    """A part of the buffer that is reduced at once; numbers, from the buffer's beginning."""

    start: int
    stop: int  # padding included
    spans: tuple[tuple[int, int], ...]  # of its parameters

    def share(self, ranks: int) -> int:
        """Numbers of parameters in the first of ``ranks`` equal parts."""
        end = self.start + (self.stop - self.start) // ranks
        return sum(max(0, min(stop, end) - start) for start, stop in self.spans)


def lay_out(
    parameters: Sequence[tuple[int, bool]], *, limit: int | None, step: int | None
) -> list[Bucket]:
    """Lay out a buffer, and return its buckets.

    Args:
        parameters: (numbers, whether it has a bucket of its own), as the model registers them.
        limit: numbers at which a bucket is closed; None: never.
        step: number that divides every bound of a bucket; None: nothing is padded.
    """
    buckets: list[Bucket] = []
    spans: list[tuple[int, int]] = []
    begin = at = 0

    def close() -> None:
        nonlocal begin, at, spans
        end = _round_up(at, step)
        buckets.append(Bucket(begin, end, tuple(spans)))
        begin, at, spans = end, end, []

    for numbers, alone in reversed(parameters):
        at = _round_up(at, step and PARAMETER_STEP)
        if alone and spans:
            close()
        spans.append((at, at + numbers))
        at += numbers
        if alone or (limit is not None and at - begin >= limit):
            close()
    if spans:
        close()
    return buckets


@functools.cache
def held_from_shapes(
    arch: Arch,
    parallel: ParallelConfig,
    stage: int,
    *,
    distributed: bool,
    overlap: bool,
    itemsize: int,
    critic: bool = False,
) -> Held:
    """Return the memory that tensor rank 0 and data rank 0 of a pipeline stage would hold.

    Args:
        distributed, overlap: ``optimizer.distributed`` and ``optimizer.overlap_grad_reduce``.
        itemsize: bytes of a weight; weights of 4 bytes are their own masters.
        critic: a head of one value takes the output layer's place.
    """
    sizes = _parameters(arch, parallel.tensor, parallel.pipeline, stage, critic=critic)
    copies = parallel.data * parallel.context
    # Stages behind the first reduce outside the critical path, in one bucket.
    bucketed = overlap and stage == 0
    buckets = lay_out(
        [(numbers, shared and distributed) for numbers, shared in sizes],
        limit=max(BUCKET, BUCKET_PER_RANK * parallel.data) if bucketed else None,
        step=math.lcm(copies, BUCKET_STEP) if distributed else None,
    )
    numbers = sum(size for size, _ in sizes)
    updated = sum(bucket.share(copies if distributed else 1) for bucket in buckets)
    return Held(
        parameters=numbers,
        largest=max(size for size, _ in sizes),
        weights=itemsize * (buckets[-1].stop if distributed else numbers),
        gradients=4 * buckets[-1].stop,
        masters=0 if itemsize == 4 else 4 * updated,
        moments=2 * 4 * updated,
    )


@functools.cache
def _parameters(
    arch: Arch, tensor: int, pipeline: int, stage: int, *, critic: bool
) -> list[tuple[int, bool]]:
    """(numbers, whether another stage has a copy) of each parameter, as GPTModel registers them."""
    layers = arch.num_layers // pipeline
    first, last = stage == 0, stage == pipeline - 1
    ops = stage_ops(
        arch, range(stage * layers, (stage + 1) * layers), first=first, last=last and not critic
    )
    parameters = []
    for op in sorted(ops, key=lambda op: _place(op.megatron)):
        numbers = 0
        for part in op.hf:
            shape = part.shape
            if part.vocabulary:
                shape = (_round_up(shape[0], tensor), *shape[1:])
            numbers += math.prod(shape) // (tensor if part.split_dim is not None else 1)
        shared = arch.tied and pipeline > 1 and not op.megatron.startswith("decoder.")
        parameters.append((numbers, shared))
    if critic and last:
        parameters += [(arch.hidden, False), (arch.hidden, False), (1, False)]  # norm; weight, bias
    return parameters


def _place(name: str) -> tuple[int, int, int]:
    """Where GPTModel registers a parameter: end or middle, layer, place in the layer."""
    if not name.startswith("decoder."):
        return (0 if name.startswith("embedding.") else 2, 0, 0)
    if not name.startswith("decoder.layers."):
        return (1, 1 << 30, 0)
    layer = int(name.split(".")[2])
    return (1, layer, next(place for place, part in enumerate(ORDER) if part in name))


def _round_up(number: int, step: int | None) -> int:
    return -(-number // step) * step if step else number
