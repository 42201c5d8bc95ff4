"""Read slices of a Hugging Face checkpoint: safetensors only, one tensor or part at a time."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qurl_megatron.errors import ConfigError
from qurl_megatron.weights.families import is_vocabulary
from qurl_megatron.weights.ops import HfTensor, Op
from qurl_megatron.weights.uaq import folded


class HfReader:
    """The tensors of a checkpoint folder by name, whole or as tensor-parallel slices."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        files = _files(self.folder)
        try:
            self._readers = {file: safe_open(file, framework="pt") for file in files}
        except SafetensorError as error:
            raise ConfigError(
                f"a safetensors file in {self.folder} cannot be read: {error}"
            ) from None
        self._file_of = {
            name: file
            for file, reader in self._readers.items()
            for name in reader.keys()  # noqa: SIM118  a reader is no dict: only keys() lists it
        }

    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(
        self, tensor: HfTensor, rank: int = 0, size: int = 1, rows: int | None = None
    ) -> Tensor:
        """Slice ``rank`` of ``size`` equal ones along the tensor's split dimension.

        Args:
            rows: for a vocabulary padded to ``rows``, the padded length of dimension 0; the
                rows beyond the stored ones are zero.
        """
        source = self._slice(tensor.name)
        if tensor.split_dim is None or size == 1 and rows is None:
            return source[...]
        length = source.get_shape()[tensor.split_dim]
        step = (rows or length) // size
        start, stop = min(rank * step, length - 1), min((rank + 1) * step, length)
        if rank * step >= length:  # nothing but padding
            return source[start:stop].new_zeros(step, *source.get_shape()[1:])
        part = source[start:stop] if tensor.split_dim == 0 else source[:, start:stop]
        if rows is None or part.shape[0] == step:
            return part
        return torch.cat([part, part.new_zeros(step - part.shape[0], *part.shape[1:])])

    def _slice(self, name: str):
        if name not in self._file_of:
            raise ConfigError(f"tensor {name} is not in the checkpoint {self.folder}")
        return self._readers[self._file_of[name]].get_slice(name)


def load_parameter(
    op: Op, reader: HfReader, *, rank: int, size: int, uaq_scale: float, padded_vocab: int
) -> Tensor:
    """One Megatron parameter in FP32: this tensor rank's slices, folded by ``uaq_scale``, fused."""
    slices = {}
    for tensor in op.hf:
        rows = padded_vocab if is_vocabulary(tensor.name) else None
        slices[tensor.name] = folded(
            tensor.name, reader.read(tensor, rank, size, rows).float(), uaq_scale
        )
    return op.to_megatron(slices)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ConfigError(f"{index} names {missing[0]}, which is not in {folder}")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    raise ConfigError(
        f"{folder} has no model.safetensors and no index; pickle checkpoints are not read, "
        "save it as safetensors"
    )
