"""Weights between Hugging Face and Megatron: a table of invertible ops, and the UAQ fold.

A name is imported when it is first asked for: the planner reads ``families`` without torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "source": ("Checkpoint", "Reader", "load_parameter", "open_checkpoint"),
    "families": ("stage_ops",),
    "hf_reader": ("HfReader",),
    "uaq": ("fold_uaq", "folded_scale", "refuse_second_fold", "unfold_uaq"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
