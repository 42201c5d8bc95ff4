"""The embedded engine's weights as an update sees them: the decoder's slots, on one rank."""

from collections.abc import Mapping

import torch

from qurl_megatron.engines.embedded.engine import Engine
from qurl_megatron.tensors.slice import Shard


class EmbeddedWeights:
    """``engines.session.LiveWeights`` of an embedded engine; for the thread that owns it."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._slots = engine, engine.decoder.slots

    def tensor_rank(self) -> int:
        return 0

    def targets(self) -> Mapping[str, Shard]:
        return {name: Shard.whole(name, slot.target) for name, slot in self._slots.items()}

    def takes(self, target: Shard, dtype: torch.dtype) -> bool:
        """Other floats, too, and FP8 codes where a CPU keeps their values as FP32."""
        return dtype in self._slots[target.name].dtypes

    def finish(self) -> None:
        self._engine.written()
