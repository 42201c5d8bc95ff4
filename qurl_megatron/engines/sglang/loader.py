"""The hook that SGLang calls with each message of an update, on every rank."""

import logging
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from qurl_megatron.engines.sglang.targets import targets, tensor_rank, turn_back
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.wire.message import Message
from qurl_megatron.wire.session import UpdateEnd

logger = logging.getLogger(__name__)

_ends: "WeakKeyDictionary[nn.Module, UpdateEnd]" = WeakKeyDictionary()


class SGLangWeights:
    """The parameters of one rank of an SGLang model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def tensor_rank(self) -> int:
        return tensor_rank(self._model)

    def targets(self) -> Mapping[str, Shard]:
        return targets(self._model)

    def takes(self, target: Shard, dtype: torch.dtype) -> bool:
        return dtype == target.value.dtype

    def finish(self) -> None:
        """Ready for SGLang, which transposes at the end of its own session, whatever happened."""
        turn_back(self._model)


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """SGLang's hook: ``named_tensors`` is ``wire.payload``'s one pair, and the name the message."""
    try:
        message = Message.from_json(named_tensors[0][0])
    except ConfigError as error:
        logger.error("%s", error)  # of no session, so there is nowhere to leave a receipt
        return
    if model not in _ends:
        _ends[model] = UpdateEnd(SGLangWeights(model))
    _ends[model].handle(message)
