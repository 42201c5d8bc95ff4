"""Weights from a Hugging Face folder or a Megatron checkpoint.

Files are memory-mapped: reading them costs page cache, not a second copy of the model. Nothing is
unpickled.
"""

from pathlib import Path

import torch
from torch import Tensor

from qurl_megatron.checkpoints.huggingface import HfReader
from qurl_megatron.checkpoints.places import description_of, find_torch_dist
from qurl_megatron.checkpoints.source import open_checkpoint
from qurl_megatron.engines.embedded.decoder import FLOATS, Decoder
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.quant import export, quantize
from qurl_megatron.schemes import SCALES
from qurl_megatron.tensors.arch import read_config
from qurl_megatron.tensors.table import is_quantized


def read_weights(folder: Path, decoder: Decoder) -> dict[str, Tensor]:
    """Return all tensors of a folder as the decoder takes them.

    Raises:
        ConfigError: a file is damaged, a tensor is there twice, or only some layers are quantized.
    """
    stored: dict[str, Tensor] = {}
    if find_torch_dist(folder):
        checkpoint = open_checkpoint(folder)
        for op in checkpoint.ops():
            stored |= checkpoint.reader.shards(op)
    else:
        reader = HfReader(folder)
        for name in sorted(reader.stored):
            stored[name] = reader.whole(name)
    return _from_hugging_face(stored, decoder)


def stored_scheme(folder: Path) -> str | None:
    """Return the scheme of a folder's weights if they are quantized already, else None.

    Raises:
        ConfigError: they are quantized in a way that the embedded engine cannot compute.
    """
    try:
        return export.read_quantization(read_config(description_of(folder)))
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None


def refuse_other_scheme(folder: Path, scheme: str) -> None:
    """Raise ``ConfigError`` if a folder is quantized already, but not to ``scheme``."""
    stored = stored_scheme(folder)
    if stored not in (None, scheme):
        raise ConfigError(
            f"{folder} holds weights of scheme {stored}, not {scheme}; give --scheme {stored}, or "
            "the checkpoint they were made from"
        )


def _from_hugging_face(stored: dict[str, Tensor], decoder: Decoder) -> dict[str, Tensor]:
    """Drop a tied model's copy of the head, convert FP16 to FP32, and quantize what is not yet.

    Raises:
        ConfigError: only some of the layers to be quantized are quantized already.
    """
    of_block = [name for name in stored if is_quantized(name)]
    floats = [n for n in of_block if stored[n].is_floating_point() and stored[n].itemsize > 1]
    if 0 < len(floats) < len(of_block):
        raise ConfigError(
            f"{floats[0]} is {stored[floats[0]].dtype} where other layers are quantized; the "
            "engine computes all layers of a block alike, so quantize all of them or none"
        )
    scheme, tensors = decoder.scheme, {}
    scales = {name + end for name in of_block for end in SCALES if scheme != "none"}
    for name, tensor in stored.items():
        unneeded = name.endswith("rotary_emb.inv_freq")
        unneeded |= name == "lm_head.weight" and decoder.arch.tied
        if unneeded or name in scales:  # scales come with their weights
            continue
        if tensor.dtype is torch.float16:
            tensor = tensor.float()
        if scheme == "none" or not is_quantized(name):
            tensors[name] = tensor
        elif tensor.dtype in FLOATS:
            tensors |= export.stored(name, quantize(tensor, scheme), scheme)
        else:
            tensors |= export.stored(name, export.loaded(name, stored, scheme), scheme)
    return tensors
