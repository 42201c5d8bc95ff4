"""Arithmetic that ``train.align`` asks of the policy's layers."""

import torch

from qurl_megatron.actor.aligned import Align
from qurl_megatron.config import RunConfig


def alignment(config: RunConfig, device: torch.device) -> Align | None:
    """Return how linear layers follow the engines'; None: they compute with weights as they are.

    Args:
        device: of the policy; SGLang engines of a run on a CPU have the embedded engine's kernels.
    """
    if config.train.align == "none":
        return None
    return Align(
        scheme=config.quant.scheme,
        activations=config.train.align == "full",
        arithmetic=config.rollout.kind.arithmetic if device.type == "cuda" else "exact",
        engine_tensor=config.engine_tensor,
    )
