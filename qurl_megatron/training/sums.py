"""Sums for metrics, fetched from the device together.

Every number that Python reads by itself waits until the GPU has done all that was asked of it, and
the GPU then waits for more. A microbatch has a dozen of them.
"""

import torch
from torch import Tensor


def fetched_sums(*values: Tensor) -> list[float]:
    """The sum of each tensor, in float64, with one wait for the device."""
    return torch.stack([value.detach().sum(dtype=torch.float64) for value in values]).tolist()
