"""The transports there are: each a module with both ends. A new one is a row here."""

from collections.abc import Callable
from typing import Any

from qurl_megatron.errors import ConfigError
from qurl_megatron.wire.files import FilesReceiver
from qurl_megatron.wire.group import GroupReceiver
from qurl_megatron.wire.shared_memory import MemoryReceiver
from qurl_megatron.wire.transport import Receiver

RECEIVERS: dict[str, Callable[[dict[str, Any], int], Receiver]]
RECEIVERS = {"files": FilesReceiver, "memory": MemoryReceiver, "group": GroupReceiver}


def open_receiver(transport: dict[str, Any], rank: int) -> Receiver:
    """The engine's end of what ``Sender.describe`` says.

    Args:
        rank: this engine's tensor-parallel rank.

    Raises:
        ConfigError: no such transport, or its other end cannot be reached in time.
    """
    kind = transport.get("kind")
    if kind not in RECEIVERS:
        raise ConfigError(f"transport {kind!r} is unknown; this engine has {', '.join(RECEIVERS)}")
    try:
        return RECEIVERS[kind](transport, rank)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the description of transport {kind} is malformed: {error!r}") from None
