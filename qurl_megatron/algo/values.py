"""The critic's loss: squared distance to the returns, and how far a value may move at once."""

import torch
from torch import Tensor


def value_loss(
    values: Tensor, before: Tensor, returns: Tensor, *, clip: float
) -> tuple[Tensor, Tensor]:
    """``max((v - R)^2, (clip(v, before - clip, before + clip) - R)^2) / 2`` per token.

    The larger of the two is the pessimistic one: a value that has moved further than ``clip``
    towards its return gains nothing more, one that has moved away from it is still called back.

    Args:
        values: predictions of the critic being optimised, [N].
        before: its predictions before this update, [N].
        returns: their targets, [N].
        clip: how far a value may move from ``before``; 0 does not clip.

    Returns:
        [N] loss, to be minimised, and [N] bool: the clip stops this token's gradient.
    """
    before, returns = before.detach(), returns.detach()
    free = (values - returns).square()
    if not clip:
        return 0.5 * free, torch.zeros_like(free, dtype=torch.bool)
    bounded = (values.detach().clamp(before - clip, before + clip) - returns).square()
    clipped = bounded > free
    return 0.5 * torch.where(clipped, bounded, free), clipped
