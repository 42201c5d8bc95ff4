"""Flat tokens and the responses they belong to.

The response tokens of a batch lie in one flat tensor, one response after the other. Either
``owners`` says to which response each token belongs, or ``lengths`` how many tokens each has.

Shapes: N = tokens, R = responses (some may be empty).
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def owners_of(lengths: Sequence[int] | Tensor) -> Tensor:
    """Return the response that each token belongs to, [R] -> [N] int64."""
    lengths_R = torch.as_tensor(lengths, dtype=torch.int64)
    return torch.arange(len(lengths_R), device=lengths_R.device).repeat_interleave(lengths_R)


def sum_per_response(values: Tensor, owners: Tensor, responses: int) -> Tensor:
    """Return the sum over the tokens of each response, [N] -> [R] float64.

    In float64, because a response may have thousands of log-ratios whose sum is exponentiated.
    """
    sums_R = torch.zeros(responses, dtype=torch.float64, device=values.device)
    return sums_R.index_add_(0, owners, values.double())


def mean_per_response(values: Tensor, owners: Tensor, responses: int) -> Tensor:
    """Return the mean over the tokens of each response, [N] -> [R] float64; 0 for an empty one."""
    count_R = sum_per_response(torch.ones_like(values), owners, responses)
    return sum_per_response(values, owners, responses) / count_R.clamp(min=1)
