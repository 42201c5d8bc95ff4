"""Published versions read back whole, with everything that their manifest promises verified."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from qurl_megatron.kit.record import decode
from qurl_megatron.wire.manifest import MANIFEST, Manifest, TensorEntry
from qurl_megatron.wire.message import checksum


def read_manifest(folder: Path) -> Manifest:
    return decode(Manifest, (folder / MANIFEST).read_bytes())


def read_version(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a version, joined from its slices."""
    manifest = read_manifest(folder)
    readers = {}
    for name, size in manifest.files.items():
        assert (folder / name).stat().st_size == size, name
        readers[name] = safe_open(folder / name, framework="pt")
    return {name: _joined(name, entry, readers) for name, entry in manifest.tensors.items()}


def _joined(name: str, entry: TensorEntry, readers: dict[str, safe_open]) -> Tensor:
    whole = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    for part in entry.slices:
        tensor = readers[part.file].get_tensor(name)
        assert tensor.dtype == whole.dtype, name
        assert checksum(tensor) == part.checksum, f"{name} in {part.file} is damaged"
        place = whole
        if entry.split_dim is not None:
            place = whole.narrow(entry.split_dim, part.start, part.length)
        assert tensor.shape == place.shape, name
        place.copy_(tensor)
    return whole
