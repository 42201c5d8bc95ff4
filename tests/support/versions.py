"""Published versions read back whole."""

from collections.abc import Iterable

import torch
from torch import Tensor

from qurl_megatron.wire.message import Piece

Pieces = Iterable[tuple[Piece, Tensor]]


def joined(pieces: Pieces) -> dict[str, Tensor]:
    """Whole tensors; their slices must lie one behind the other."""
    by_name: dict[str, list[tuple[Piece, Tensor]]] = {}
    for piece, value in pieces:
        by_name.setdefault(piece.name, []).append((piece, value))
    tensors = {}
    for name, parts in by_name.items():
        parts.sort(key=lambda part: part[0].start)
        starts = [piece.start for piece, _ in parts]
        assert starts == [0, *(piece.stop for piece, _ in parts[:-1])], name
        tensors[name] = torch.cat([value for _, value in parts], dim=parts[0][0].dim or 0)
    return tensors
