"""Parts of tensors as a training rank holds them."""

from torch import Tensor

from qurl_megatron.tensors.slice import Shard


def shard(name: str, value: Tensor, dim: int | None = None, start: int = 0) -> Shard:
    """For senders, who carry parts of tensors of any size."""
    return Shard(name, value, (), dim, start)
