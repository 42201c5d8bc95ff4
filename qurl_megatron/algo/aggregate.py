"""The set over which the per-token objective is averaged: a weight for the tokens of each response.

The weights of a minibatch are computed once, from the lengths of all its responses on every
data-parallel rank. Then ``loss = -sum(weight * J)`` over whatever tokens a microbatch holds, and
the plain sum over microbatches and ranks is the loss of the whole minibatch, however it was split.
(Megatron's data-parallel reduction must therefore sum gradients, not average them.)
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def token_weights(
    lengths: Sequence[int] | Tensor, kind: str = "response_mean", *, constant: int | None = None
) -> Tensor:
    """Return the weight of one token of each response, [R] float32 on the CPU.

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
    assert kind != "constant" or constant, f"constant aggregation needs one, got {constant}"
    ones_R = torch.ones_like(lengths_R)
    weights_R = AGGREGATIONS[kind](lengths_R, ones_R / (lengths_R > 0).sum(), constant)
    return weights_R.masked_fill(lengths_R == 0, 0.0).float()


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "response_mean": lambda lengths_R, share_R, constant: share_R / lengths_R,
    "token_mean": lambda lengths_R, share_R, constant: torch.ones_like(share_R) / lengths_R.sum(),
    "response_sum": lambda lengths_R, share_R, constant: share_R,
    "constant": lambda lengths_R, share_R, constant: share_R / constant,
}
"""The weight of each response's tokens; ``share_R`` is one over the number of responses that have
any."""
