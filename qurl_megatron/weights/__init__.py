"""Weights between Hugging Face and Megatron: a table of invertible ops, and the UAQ fold."""

from qurl_megatron.weights.arch import Arch, read_arch, read_config, read_eos
from qurl_megatron.weights.checkpoint import Checkpoint, Reader, load_parameter, open_checkpoint
from qurl_megatron.weights.families import is_quantized, is_vocabulary, stage_ops
from qurl_megatron.weights.hf_reader import HfReader
from qurl_megatron.weights.uaq import fold_uaq, folded_scale, refuse_second_fold, unfold_uaq

__all__ = [
    "Arch",
    "Checkpoint",
    "HfReader",
    "Reader",
    "fold_uaq",
    "folded_scale",
    "is_quantized",
    "is_vocabulary",
    "load_parameter",
    "open_checkpoint",
    "read_arch",
    "read_config",
    "read_eos",
    "refuse_second_fold",
    "stage_ops",
    "unfold_uaq",
]
