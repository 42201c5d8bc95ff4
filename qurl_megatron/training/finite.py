"""Numbers that are not finite end a run in the step that made them, before they travel.

Every rank looks at its own masters after a step: one pass and one word to the host, which goes to
the other ranks with the step's metrics. So nothing is published or saved that no forward pass can
compute with, and the newest checkpoint stays one that a run can go on from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.actor.trained import Trained

LARGEST = 1e7
"""Root mean square of a tensor from which on products of a few weights leave the range of FP32."""


class NotFinite(RuntimeError):
    """Losses, gradients or weights are not finite: which tensor, where. The same on every rank."""


@dataclass(frozen=True)
class Weights:
    """Findings of one rank on its part of the weights."""

    squares: float  # their sum; over all ranks each weight counts once
    bad: str | None  # the first tensor that is not finite, or too large


@torch.no_grad()
def look(models: Sequence[Trained]) -> Weights:
    """This rank's masters after a step."""
    squares, bad = 0.0, None
    for model in models:
        masters = list(model.masters())
        if not masters:
            continue
        norms_N = torch.stack(torch._foreach_norm([master for _, master, _ in masters]))
        sizes_N = norms_N.new_tensor([max(1, master.numel()) for _, master, _ in masters])
        once_N = norms_N.new_tensor([float(once) for _, _, once in masters])
        rms_N = norms_N / sizes_N.sqrt()
        total = (norms_N.double() * once_N).square().sum()
        total, worst = torch.stack([total, rms_N.max().double()]).tolist()
        squares += total
        if bad is None and not worst <= LARGEST:
            index = [not rms <= LARGEST for rms in rms_N.tolist()].index(True)
            bad = f"{masters[index][0]} on rank {model.ranks.rank} {_how_bad(masters[index][1])}"
    return Weights(squares, bad)


def norm_of(parts: Sequence[Weights]) -> float:
    """Return the norm of all weights, from the findings of every rank.

    Raises:
        NotFinite: a rank has weights that are not finite, or too large.
    """
    bad = next((part.bad for part in parts if part.bad), None)
    if bad:
        raise NotFinite(f"weights are not finite, or too large to compute with: {bad}")
    return math.sqrt(sum(part.squares for part in parts))


def check_gradient(model: Trained, norm: float) -> None:
    """Raise ``NotFinite`` where the norm, the same on every rank, is not finite; all call it."""
    if math.isfinite(norm):
        return
    everywhere: list[str | None] = [None] * model.ranks.world_size
    dist.all_gather_object(everywhere, _first_bad_gradient(model))
    first = next(
        filter(None, everywhere), "each tensor is, but not the sum of their squares in FP32"
    )
    raise NotFinite(f"the gradient is not finite: {first}")


def check_losses(metrics: dict[str, float]) -> None:
    """Raise ``NotFinite`` where a loss is not finite.

    Args:
        metrics: merged over all ranks.
    """
    for name, value in metrics.items():
        if name.endswith("/loss") and not math.isfinite(value):
            raise NotFinite(f"{name} is {value}")


class Growth:
    """Notices when the weights' norm doubles, which no useful learning rate brings about."""

    def __init__(self, norm: float) -> None:
        self._norm = norm

    def noticed(self, norm: float) -> str | None:
        """A sentence where the norm has doubled since the last one, or since the start."""
        before = self._norm
        if norm <= 2 * before:
            return None
        self._norm = norm
        return f"the norm of the weights has grown from {before:.4g} to {norm:.4g}"


def _first_bad_gradient(model: Trained) -> str | None:
    for name, parameter in model.gpt.named_parameters():
        gradient = getattr(parameter, "main_grad", None)
        if gradient is not None and not bool(gradient.isfinite().all()):
            return f"{name} on rank {model.ranks.rank} {_how_bad(gradient)}"
    return None


def _how_bad(tensor: Tensor) -> str:
    if bool(tensor.isnan().any()):
        return "has NaN"
    if bool(tensor.isinf().any()):
        return "has infinity"
    return f"has values up to {tensor.abs().max().item():.3g}"
