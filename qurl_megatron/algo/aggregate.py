"""What the per-token objective is averaged over: a weight for the tokens of each response.

The weights of a minibatch are computed once, from the lengths of all its responses on every
data-parallel rank. Then ``loss = -sum(weight * J)`` over whatever tokens a microbatch holds, and
the plain sum over microbatches and ranks is the loss of the whole minibatch, however it was split.
(Megatron's data-parallel reduction must therefore sum gradients, not average them.)
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

AggregationKind = Literal["response_mean", "token_mean"]


def token_weights(
    lengths: Sequence[int] | Tensor, kind: AggregationKind = "response_mean"
) -> Tensor:
    """Weight of one token of each response, [R] float32 on the CPU.

    Args:
        lengths: loss tokens of every response of the minibatch, over all ranks, [R].
        kind: response_mean averages within a response, then over responses (GRPO); token_mean
            over all tokens alike (DAPO).

    A response without tokens gets weight 0 and does not count as a response, so that empty
    responses can fill up microbatches.
    """
    lengths_R = torch.as_tensor(lengths, dtype=torch.float64, device="cpu")
    assert lengths_R.ndim == 1 and bool((lengths_R >= 0).all()), f"bad lengths {lengths}"
    weights_R = AGGREGATIONS[kind](lengths_R)
    return weights_R.masked_fill(lengths_R == 0, 0.0).float()


def response_mean(lengths_R: Tensor) -> Tensor:
    return 1 / (lengths_R * (lengths_R > 0).sum())


def token_mean(lengths_R: Tensor) -> Tensor:
    return torch.ones_like(lengths_R) / lengths_R.sum()


AGGREGATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "response_mean": response_mean,
    "token_mean": token_mean,
}
