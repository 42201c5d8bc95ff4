"""Checkpoints of Hugging Face and Megatron: a table of invertible ops, the UAQ fold, conversions.

A name is imported when it is first asked for: the planner reads ``families`` without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qurl_megatron.checkpoints.huggingface import HfReader as HfReader
    from qurl_megatron.checkpoints.ops import stage_ops as stage_ops
    from qurl_megatron.checkpoints.source import Checkpoint as Checkpoint
    from qurl_megatron.checkpoints.source import CheckpointReader as CheckpointReader
    from qurl_megatron.checkpoints.source import load_parameter as load_parameter
    from qurl_megatron.checkpoints.source import open_checkpoint as open_checkpoint
    from qurl_megatron.checkpoints.uaq import fold_uaq as fold_uaq
    from qurl_megatron.checkpoints.uaq import folded_scale as folded_scale
    from qurl_megatron.checkpoints.uaq import refuse_second_fold as refuse_second_fold
    from qurl_megatron.checkpoints.uaq import unfold_uaq as unfold_uaq

_HOMES = {
    "source": ("Checkpoint", "CheckpointReader", "load_parameter", "open_checkpoint"),
    "ops": ("stage_ops",),
    "huggingface": ("HfReader",),
    "uaq": ("fold_uaq", "folded_scale", "refuse_second_fold", "unfold_uaq"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
