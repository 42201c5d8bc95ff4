"""Read a Megatron ``torch_dist`` checkpoint through the ops, whatever layout wrote it."""

import re
from pathlib import Path

import torch
from torch import Tensor

from qurl_megatron.checkpoints.huggingface import FLOATS
from qurl_megatron.checkpoints.ops import GateUp, Op, ops_on_disk
from qurl_megatron.checkpoints.torch_dist import TorchDistReader
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import Arch
from qurl_megatron.tensors.slice import Slice

# Where an optimizer keeps FP32 masters: with and without Megatron's distributed optimizer.
_MASTERS = ("optimizer.state.param.", "optimizer.state.fp32_param.")

CRITIC = "critic."
"""Prefix of a critic's tensors in a run's checkpoint."""

# Prefixes of the tensors beside the model in a checkpoint of a run.
_BESIDE = ("optimizer.", "chained_", "rng", CRITIC)

# Megatron-LM pads a vocabulary to 128 rows for each of at most 64 tensor-parallel ranks.
_MOST_PADDING = 128 * 64

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")


def disk_key(parameter: str) -> tuple[str, tuple[int, ...]]:
    """Return the stored tensor a parameter lies in, and its index: layers and experts are stacked.

    >>> disk_key("decoder.layers.3.mlp.experts.local_experts.5.linear_fc2.weight")
    ('decoder.layers.mlp.experts.experts.linear_fc2.weight', (3, 5))
    """
    layer = _LAYER.fullmatch(parameter)
    if layer is None:
        return parameter, ()
    expert = _EXPERT.fullmatch(layer[2])
    if expert is None:
        return f"decoder.layers.{layer[2]}", (int(layer[1]),)
    return f"decoder.layers.mlp.experts.experts.{expert[2]}", (int(layer[1]), int(expert[1]))


def stacked_parts(op: Op) -> int:
    """Return how many tensors are stacked in a parameter, each split over tensor ranks."""
    return len(op.hf) if isinstance(op, GateUp) else 1


class MegatronReader:
    """The Hugging Face tensors of a Megatron checkpoint, from FP32 masters where it has them."""

    def __init__(self, folder: str | Path, arch: Arch) -> None:
        self.folder = Path(folder)
        self.arch = arch
        self.table = TorchDistReader(self.folder)
        self.stored = self.table.tensors
        # Names on disk follow from the Hugging Face names: a model without Transformer Engine has
        # other names for its norms, and a tied output layer is the embedding.
        self._on_disk = {op.hf[0].name: op.megatron for op in ops_on_disk(arch)}
        embedding = "embedding.word_embeddings.weight"
        self.masters = next((p for p in _MASTERS if f"{p}{embedding}" in self.stored), "")
        """Prefix of the FP32 masters that the model is read from; empty: there are none."""

    def shards(
        self, op: Op, *, rank: int = 0, size: int = 1, padded_vocab: int | None = None
    ) -> dict[str, Tensor]:
        """Return the Hugging Face tensors of an op, or slice ``rank`` of ``size`` of each.

        Args:
            padded_vocab: rows of an embedding split evenly over ``size``; those beyond the
                vocabulary are zero. None leaves the padding out.
        """
        if op.hf[0].vocabulary:
            rows = padded_vocab or self.arch.vocab
            return op.to_hf(self._vocabulary(op, rank * (rows // size), rows // size))
        return op.to_hf(self._parameter(op, rank, size))

    def widest(self, op: Op) -> torch.dtype:
        """Return the format of ``shards``: the master's if there is one."""
        return self.stored[self._place(op)[0]].dtype

    def dtype(self, op: Op) -> torch.dtype:
        """Return the model's own format of a parameter; its master is FP32 all the same."""
        key, _ = self._place(op)
        return self.stored[key.removeprefix(self.masters)].dtype

    def holds(self, op: Op) -> bool:
        """Return whether the checkpoint has the parameter."""
        return self._find(op) is not None

    def check(self, arch: Arch) -> None:
        """Compare every tensor's name, shape and format with the config, from headers alone.

        Raises:
            ConfigError: one is missing, or is left over, or has another shape or format.
        """
        expected: set[str] = set()
        for op in ops_on_disk(arch):
            key, index = self._place(op)
            expected.add(key.removeprefix(self.masters))
            expected_shape = arch.stacked[: len(index)] + op.shape
            stored = self.stored[key]
            actual, rows = stored.shape, len(index)
            padding = -1
            if len(actual) == len(expected_shape):
                padding = actual[rows] - expected_shape[rows]
            padded = op.hf[0].vocabulary and 0 <= padding < _MOST_PADDING
            same_columns = actual[rows + 1 :] == expected_shape[rows + 1 :]
            if actual != expected_shape and not (padded and same_columns):
                raise ConfigError(
                    f"tensor {key} in {self.folder} has shape {list(actual)} where config.json "
                    f"says {list(expected_shape)}; give the config of this model"
                )
            if stored.dtype not in FLOATS:
                raise ConfigError(
                    f"tensor {key} in {self.folder} is stored as {stored.dtype}, which is not high "
                    "precision"
                )
        for key in self.stored:
            if key not in expected and not key.startswith(_BESIDE):
                raise ConfigError(
                    f"tensor {key} in {self.folder} is not part of a model of type "
                    f"{arch.family} as config.json has it; it would be lost"
                )

    def _parameter(self, op: Op, rank: int, size: int) -> Tensor:
        key, index = self._place(op)
        shape = list(self.stored[key].shape[len(index) :])
        split_dim, parts = op.hf[0].split_dim, stacked_parts(op)
        if split_dim is None:
            return self._read(key, index, [0] * len(shape), shape)
        part = shape[split_dim] // parts
        shape[split_dim] = part // size
        boxes = []
        for number in range(parts):
            offsets = [0] * len(shape)
            offsets[split_dim] = number * part + rank * shape[split_dim]
            boxes.append(self._read(key, index, offsets, shape))
        if parts == 1:
            return boxes[0]
        return torch.cat(boxes, split_dim)

    def _vocabulary(self, op: Op, start: int, rows: int) -> Tensor:
        key, index = self._place(op)
        tensor = self.stored[key]
        width, stop = tensor.shape[-1], min(start + rows, self.arch.vocab)
        if stop <= start:
            return torch.zeros(rows, width, dtype=tensor.dtype)
        stored = self._read(key, index, [start, 0], [stop - start, width])
        if stop - start == rows:
            return stored
        return torch.cat([stored, stored.new_zeros(rows - (stop - start), width)])

    def _read(self, key: str, index: tuple[int, ...], offsets: list, shape: list) -> Tensor:
        part = Slice((*index, *offsets), (*(1 for _ in index), *shape))
        return self.table.read(key, part).reshape(shape)

    def _place(self, op: Op) -> tuple[str, tuple[int, ...]]:
        """Return key and leading indices of a parameter."""
        place = self._find(op)
        if place is None:
            key, _ = disk_key(self._on_disk[op.hf[0].name])
            raise ConfigError(f"tensor {key} is not in the checkpoint {self.folder}")
        return place

    def _find(self, op: Op) -> tuple[str, tuple[int, ...]] | None:
        name = self._on_disk[op.hf[0].name]
        # Megatron writes layers that differ from each other under keys of their own.
        for key, index in (disk_key(name), (name, ())):
            if f"{self.masters}{key}" in self.stored:
                return f"{self.masters}{key}", index
        return None
