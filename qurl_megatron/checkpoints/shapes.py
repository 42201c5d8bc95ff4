"""The shapes that config.json gives to a model's tensors, without torch and without its weights."""

import math

from qurl_megatron.checkpoints.families import stage_ops
from qurl_megatron.tensors.arch import Arch


def hf_shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
    """The shape a config gives to each Hugging Face tensor of the model."""
    ops = stage_ops(arch, range(arch.num_layers), first=True, last=True)
    return {tensor.name: tensor.shape for op in ops for tensor in op.hf}


def parameter_count(arch: Arch) -> int:
    """Numbers in a checkpoint of the model."""
    return sum(math.prod(shape) for shape in hf_shapes(arch).values())
