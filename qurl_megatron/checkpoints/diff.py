"""Compare two checkpoints of any kinds, tensor by tensor.

Compared are the numbers the model computes with: fused Megatron parameters are taken apart,
codes are multiplied by their scales, and a UAQ factor that one side has folded in is taken out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qurl_megatron.checkpoints.huggingface import HEAD
from qurl_megatron.checkpoints.megatron_reader import MegatronReader
from qurl_megatron.checkpoints.ops import Op
from qurl_megatron.checkpoints.source import Checkpoint
from qurl_megatron.checkpoints.uaq import unfolded
from qurl_megatron.quant import QuantizedWeight, code_flips, dequantize
from qurl_megatron.quant.export import loaded
from qurl_megatron.schemes import SCALES
from qurl_megatron.tensors.table import HfTensor, is_quantized

_CHUNK = 4 << 20  # elements in float64 at once: 32 MB


@dataclass(frozen=True)
class Difference:
    """How one tensor of B compares with its twin in A."""

    name: str
    only_in: str | None = None  # "A" or "B"
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # where they differ
    max_abs: float = 0.0
    relative: float = 0.0  # ||b - a|| / ||a||
    flips: float | None = None  # share of codes that differ, where both are quantized alike

    def beyond(self, tolerance: float) -> bool:
        """Return whether the tensors differ by more than a relative norm of ``tolerance``."""
        return bool(self.only_in or self.shapes or not self.relative <= tolerance)


def differences(a: Checkpoint, b: Checkpoint) -> Iterator[Difference]:
    """Compare all tensors of both, in the order of A's layers; then come B's own."""
    scales = (a.uaq_scale, b.uaq_scale)
    if a.uaq_scale == b.uaq_scale:
        scales = (1.0, 1.0)  # nothing to take out
    in_b = {tensor.name: (tensor, op) for tensor, op in _tensors(b)}
    for tensor, op in _tensors(a):
        if tensor.name not in in_b:
            yield Difference(tensor.name, only_in="A")
            continue
        first, second = _read(a, tensor, op), _read(b, *in_b.pop(tensor.name))
        flips = None
        codes = [x.values for x in (first, second) if isinstance(x, QuantizedWeight)]
        if len(codes) == 2 and a.scheme == b.scheme and codes[0].shape == codes[1].shape:
            changed, count = code_flips(*codes).tolist()
            flips = changed / count
        yield _compare(
            tensor.name,
            _numbers(first, tensor.name, scales[0]),
            _numbers(second, tensor.name, scales[1]),
            flips,
        )
    for name in in_b:
        yield Difference(name, only_in="B")


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[HfTensor, Op | None]]:
    """Yield the model's tensors with their ops, then all others, without."""
    reader = checkpoint.reader
    ops = [(tensor, op) for op in checkpoint.ops() for tensor in op.hf]
    if isinstance(reader, MegatronReader):
        yield from ((tensor, op) for tensor, op in ops if reader.holds(op))
        return
    unread = set(reader.stored)
    for tensor, op in ops:
        if tensor.name in unread:
            unread -= {tensor.name, *(tensor.name + end for end in SCALES)}
            yield tensor, op
    if checkpoint.arch.tied:
        unread.discard(HEAD)  # the embedding once more
    for name in sorted(unread):
        if not name.endswith(".inv_freq"):
            yield HfTensor(name, reader.stored[name].shape, quantized=is_quantized(name)), None


def _read(checkpoint: Checkpoint, tensor: HfTensor, op: Op | None) -> Tensor | QuantizedWeight:
    reader = checkpoint.reader
    if isinstance(reader, MegatronReader):
        assert op is not None
        return reader.shards(op)[tensor.name]
    if not checkpoint.scheme or not tensor.quantized:
        return reader.whole(tensor.name)
    names = {tensor.name, *(tensor.name + end for end in SCALES)} & reader.stored.keys()
    parts = {name: reader.whole(name) for name in names}
    return loaded(tensor.name, parts, checkpoint.scheme)


def _numbers(stored: Tensor | QuantizedWeight, name: str, scale: float) -> Tensor:
    if isinstance(stored, QuantizedWeight):
        stored = dequantize(stored)
    if scale == 1.0:
        return stored
    return unfolded(name, stored.float(), scale)


def _compare(name: str, a: Tensor, b: Tensor, flips: float | None) -> Difference:
    if a.shape != b.shape:
        return Difference(name, shapes=(tuple(a.shape), tuple(b.shape)))
    largest = squares = norm = 0.0
    chunks = (tensor.reshape(-1).split(_CHUNK) for tensor in (a, b))
    for chunk_a, chunk_b in zip(*chunks, strict=True):
        if not chunk_a.numel():
            continue
        difference = chunk_b.double() - chunk_a.double()
        # A nan, or an inf beside anything else, makes nan: that is a difference, whatever else.
        largest = max(largest, difference.abs().max().nan_to_num(torch.inf).item())
        squares += difference.dot(difference).item()
        norm += chunk_a.double().square().sum().item()
    if math.isnan(squares) or squares and not norm:
        squares, norm = math.inf, 1.0
    relative = (squares / norm) ** 0.5 if norm else 0.0
    return Difference(name, max_abs=largest, relative=relative, flips=flips)


def row(difference: Difference) -> str:
    """Return a difference as a line of text."""
    if difference.only_in:
        return f"{difference.name}: in {difference.only_in} only"
    if difference.shapes:
        a, b = (list(shape) for shape in difference.shapes)
        return f"{difference.name}: {a} in A, {b} in B"
    flips = "" if difference.flips is None else f", code flips {difference.flips:.3%}"
    return (
        f"{difference.name}: max abs {difference.max_abs:.3g}, "
        f"relative {difference.relative:.3g}{flips}"
    )
