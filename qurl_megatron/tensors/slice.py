"""A part of a tensor: where it lies in the whole one (``Slice``), and its values (``Shard``).

Ranks, files, buckets and engines each hold parts of the same tensors; the ``overlap`` of two slices
is their common part, and ``narrow`` its view in either. Parts are boxes: rows or columns as tensor
parallelism splits, or pieces of a row as an optimizer's state is split.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Item = TypeVar("Item")


class Slice(NamedTuple):  # a version makes 100,000: a frozen dataclass takes longer to make
    """A box in a whole tensor: the first index and the length along each of its dimensions."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> "Slice":
        return Slice((0,) * len(shape), tuple(shape))

    @staticmethod
    def along(shape: Sequence[int], dim: int, start: int, stop: int) -> "Slice":
        """Return rows (``dim`` 0) or columns (1) ``[start, stop)`` of a tensor of this shape.

        >>> Slice.along((6, 4), 0, 2, 5)
        Slice(starts=(2, 0), sizes=(3, 4))
        """
        starts, sizes = [0] * len(shape), list(shape)
        starts[dim], sizes[dim] = start, stop - start
        return Slice(tuple(starts), tuple(sizes))

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, other: "Slice") -> "Slice | None":
        """Return the part that both have; None if there is none."""
        starts, sizes = [], []
        for a, m, b, n in zip(self.starts, self.sizes, other.starts, other.sizes, strict=True):
            start, stop = max(a, b), min(a + m, b + n)
            if stop <= start:
                return None
            starts.append(start)
            sizes.append(stop - start)
        return Slice(tuple(starts), tuple(sizes))

    def narrow(self, tensor: "Tensor", held: "Slice") -> "Tensor":
        """Return the view of this slice in a tensor that holds ``held``, which must enclose it."""
        for dim, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            first = start - held.starts[dim]
            if (first, size) != (0, held.sizes[dim]):
                assert first >= 0, f"{self} lies outside {held}"  # torch would count from the end
                tensor = tensor.narrow(dim, first, size)
        return tensor


@dataclass(frozen=True)
class Shard:
    """The values of one part of a tensor, on whoever holds it."""

    name: str  # Hugging Face name
    value: "Tensor"  # [rows, columns] or [rows]
    shape: tuple[int, ...]  # of the whole tensor
    dim: int | None = None  # along which the tensor is split; None: every rank has all of it
    start: int = 0  # first row or column along ``dim``

    @staticmethod
    def whole(name: str, value: "Tensor") -> "Shard":
        return Shard(name, value, tuple(value.shape))

    @property
    def part(self) -> Slice:
        return part_at(self.value.shape, self.dim, self.start)

    def cut(self, need: Slice) -> "Shard | None":
        """Return the part of it that lies in ``need``, as a view; None if there is none."""
        source_part = self.part
        part = source_part.overlap(need)
        if part is None:
            return None
        start = 0 if self.dim is None else part.starts[self.dim]
        value = part.narrow(self.value, source_part)
        return Shard(self.name, value, self.shape, self.dim, start)


def part_at(sizes: Sequence[int], dim: int | None, start: int) -> Slice:
    """Return the part of these sizes that begins at ``start`` along ``dim``, and at 0 elsewhere."""
    return Slice(tuple(start if axis == dim else 0 for axis in range(len(sizes))), tuple(sizes))


def buckets(items: Sequence[Item], sizes: Sequence[int], limit: int) -> list[list[Item]]:
    """Return the items in their order, ``limit`` bytes at most together; a larger one is alone."""
    filled: list[list[Item]] = []
    room = 0
    for item, size in zip(items, sizes, strict=True):
        if not filled or size > room:
            filled.append([])
            room = limit
        filled[-1].append(item)
        room -= size
    return filled
