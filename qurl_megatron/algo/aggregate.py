"""The set over which the per-token objective is averaged: a weight for the tokens of each response.

The weights of a minibatch are computed once, from the lengths of all its responses on every
data-parallel rank. Then ``loss = -sum(weight * J)`` over whatever tokens a microbatch holds, and
the plain sum over microbatches and ranks is the loss of the whole minibatch, however it was split.
(Megatron's data-parallel reduction must therefore sum gradients, not average them.)
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def token_weights(
    lengths: Sequence[int] | Tensor, kind: str = "response_mean", *, constant: int | None = None
) -> Tensor:
    """Weight of one token of each response, [R] float32 on the CPU.

    Args:
        lengths: loss tokens of every response of the minibatch, over all ranks, [R].
        kind: response_mean averages within a response, then over responses (GRPO); token_mean
            over all tokens alike (DAPO); response_sum sums within a response, then averages over
            responses (RLOO); constant divides these sums by ``constant`` as well (Dr.GRPO).
        constant: the length that every response is taken to have, whatever it is; for constant.

    A response without tokens gets weight 0 and does not count as a response, so that empty
    responses can fill up microbatches.
    """
    lengths_R = torch.as_tensor(lengths, dtype=torch.float64, device="cpu")
    assert lengths_R.ndim == 1 and bool((lengths_R >= 0).all()), f"bad lengths {lengths}"
    weights_R = AGGREGATIONS[kind](lengths_R, constant)
    return weights_R.masked_fill(lengths_R == 0, 0.0).float()


def response_mean(lengths_R: Tensor, constant: int | None) -> Tensor:
    return response_sum(lengths_R, constant) / lengths_R


def token_mean(lengths_R: Tensor, constant: int | None) -> Tensor:
    return torch.ones_like(lengths_R) / lengths_R.sum()


def response_sum(lengths_R: Tensor, constant: int | None) -> Tensor:
    return torch.ones_like(lengths_R) / (lengths_R > 0).sum()


def constant_length(lengths_R: Tensor, constant: int | None) -> Tensor:
    assert constant is not None and constant > 0, f"constant aggregation needs one, got {constant}"
    return response_sum(lengths_R, constant) / constant


AGGREGATIONS: dict[str, Callable[[Tensor, int | None], Tensor]] = {
    "response_mean": response_mean,
    "token_mean": token_mean,
    "response_sum": response_sum,
    "constant": constant_length,
}
