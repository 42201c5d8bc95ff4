"""The frozen reference policy: weights of the actor's shape that take its place for a while.

There is one model. While the reference scores, its weights are in the model and the actor's wait
where the reference's did; so it costs one copy of the weights in all, on the device or the host.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor, nn

from qurl_megatron.checkpoints.source import Checkpoint
from qurl_megatron.kit.errors import ConfigError

Memory = Literal["device", "host"]

# Fields of an Arch that do not change the function its weights compute here.
_NAMES = ("family", "max_position")


@dataclass(frozen=True)
class Reference:
    """Which weights the actor is held against, and where they wait."""

    path: str = ""
    """Checkpoint, Hugging Face or Megatron; empty: the actor's own, as it is built."""

    memory: Memory = "device"


class WaitingWeights:
    """A second set of a model's weights, in the formats of its parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], memory: Memory) -> None:
        """Copy the parameters' present values.

        Args:
            memory: "host" keeps the copies in pinned memory where there is a GPU.
        """
        park = _to_host if memory == "host" else torch.clone
        self.tensors = [park(parameter.detach()) for parameter in parameters]

    @torch.no_grad()
    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy the parameters' present values over the earlier copies."""
        for parameter, other in zip(parameters, self.tensors, strict=True):
            other.copy_(parameter.detach(), non_blocking=True)

    @torch.no_grad()
    def swap(self, parameters: Iterable[nn.Parameter]) -> None:
        """Exchange them with the parameters' values, in the order they were copied.

        One parameter is held twice at a time, on the device.
        """
        for parameter, other in zip(parameters, self.tensors, strict=True):
            previous = parameter.detach().clone()
            # Copies to and from pinned memory run in the stream's order; nothing here reads them.
            parameter.copy_(other, non_blocking=True)
            other.copy_(previous, non_blocking=True)


def check_same_shape(reference: Checkpoint, actor: Checkpoint, key: str) -> None:
    """Raise ``ConfigError`` unless one model can hold the weights of both, and means the same.

    Args:
        key: the user's name for the reference.
    """
    for field in fields(actor.arch):
        theirs, ours = getattr(reference.arch, field.name), getattr(actor.arch, field.name)
        if theirs != ours and field.name not in _NAMES:
            raise ConfigError(
                f"{key}={reference.folder} has {field.name}={theirs} where the actor, "
                f"{actor.folder}, has {ours}; name a checkpoint of the actor's shape"
            )


def _to_host(tensor: Tensor) -> Tensor:
    pinned = torch.cuda.is_available()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor)
