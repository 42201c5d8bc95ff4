"""Parts of tensors as a training rank holds them."""

from torch import Tensor

from qurl_megatron.tensors.slice import Shard


def shard(name: str, value: Tensor, dim: int | None = None, start: int = 0) -> Shard:
    """The last part of a tensor, or all of it."""
    shape = tuple(start + n if axis == dim else n for axis, n in enumerate(value.shape))
    return Shard(name, value, shape, dim, start)
