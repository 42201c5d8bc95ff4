"""Any checkpoint, high precision or quantized, as Hugging Face tensors by name; to read alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from qurl_megatron.checkpoints.hf_reader import HfReader
from qurl_megatron.checkpoints.megatron_reader import MegatronReader
from qurl_megatron.checkpoints.ops import Op
from qurl_megatron.checkpoints.places import find_torch_dist
from qurl_megatron.checkpoints.source import Checkpoint, open_checkpoint
from qurl_megatron.quant import QuantizedWeight
from qurl_megatron.quant.export import loaded, read_quantization, scale_name
from qurl_megatron.tensors.arch import read_arch, read_config
from qurl_megatron.tensors.table import HfTensor, is_quantized

Kind = Literal["huggingface", "megatron", "quantized"]


@dataclass(frozen=True)
class AnyCheckpoint:
    """An opened checkpoint of any kind."""

    kind: Kind
    checkpoint: Checkpoint
    scheme: str = ""  # of a quantized one
    fmt: str = ""

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    @property
    def uaq_scale(self) -> float:
        return self.checkpoint.uaq_scale

    def tensors(self) -> Iterator[tuple[HfTensor, Op | None]]:
        """Every tensor of the model that is there, and those that are there beside it (no op)."""
        ops = [(tensor, op) for op in self.checkpoint.ops() for tensor in op.hf]
        reader = self.checkpoint.reader
        if isinstance(reader, MegatronReader):
            yield from ((tensor, op) for tensor, op in ops if reader.holds(op))
            return
        unread = reader.names()
        for tensor, op in ops:
            if tensor.name in unread:
                unread -= {tensor.name, self._scale_of(tensor.name)}
                yield tensor, op
        if self.checkpoint.arch.tied:
            unread.discard("lm_head.weight")  # the embedding once more
        unread = {name for name in unread if not name.endswith(".inv_freq")}
        for name in sorted(unread):
            yield HfTensor(name, reader.shape(name), quantized=is_quantized(name)), None

    def read(self, tensor: HfTensor, op: Op | None) -> Tensor | QuantizedWeight:
        """One tensor of ``tensors``, as it is stored."""
        reader = self.checkpoint.reader
        if isinstance(reader, MegatronReader):
            assert op is not None
            return reader.shards(op)[tensor.name]
        if self.kind != "quantized" or not tensor.quantized:
            return reader.whole(tensor.name)
        names = {tensor.name, self._scale_of(tensor.name)} & reader.names()
        parts = {name: reader.whole(name) for name in names}
        return loaded(tensor.name, parts, self.scheme, self.fmt)

    def _scale_of(self, name: str) -> str:
        if self.kind != "quantized" or not name.endswith(".weight"):
            return ""
        return scale_name(name, self.scheme, self.fmt)


def open_any(folder: Path, description: Path | None = None) -> AnyCheckpoint:
    """Open a checkpoint of any kind; nothing but headers is read.

    Raises:
        ConfigError: there is none, or one that is not understood.
    """
    if find_torch_dist(folder):
        return AnyCheckpoint("megatron", open_checkpoint(folder, description))
    config = read_config(folder)
    quantization = read_quantization(config)
    if quantization is None:
        return AnyCheckpoint("huggingface", open_checkpoint(folder))
    dense = {key: value for key, value in config.items() if key != "quantization_config"}
    checkpoint = Checkpoint(folder, folder, config, read_arch(dense), HfReader(folder))
    return AnyCheckpoint("quantized", checkpoint, *quantization)
