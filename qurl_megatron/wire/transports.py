"""The transports there are. A new one is a module with both ends, a row here, and its name in
``sync.transport``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.wire.files import FilesReceiver, FilesSender
from qurl_megatron.wire.group import GroupReceiver, GroupSender
from qurl_megatron.wire.shared_memory import MemoryReceiver, MemorySender
from qurl_megatron.wire.transport import Receiver, Sender, Site


@dataclass(frozen=True)
class Transport:
    """Both ends of one way for the bytes."""

    open_sender: Callable[[Site], Sender]  # all training ranks call it together
    open_receiver: Callable[[dict[str, Any], int], Receiver]
    one_machine: bool = False  # True: it reaches no further


TRANSPORTS = {
    "memory": Transport(MemorySender.open, MemoryReceiver, one_machine=True),
    "files": Transport(FilesSender.open, FilesReceiver),
    "group": Transport(GroupSender.open, GroupReceiver),
}


def open_receiver(transport: dict[str, Any], rank: int) -> Receiver:
    """Open the engine's end of the transport that ``Sender.describe`` describes.

    Args:
        rank: this engine's tensor-parallel rank.

    Raises:
        ConfigError: no such transport, or its other end cannot be reached in time.
    """
    kind = transport.get("kind")
    if kind not in TRANSPORTS:
        raise ConfigError(f"transport {kind!r} is unknown; this engine has {', '.join(TRANSPORTS)}")
    try:
        return TRANSPORTS[kind].open_receiver(transport, rank)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the description of transport {kind} is malformed: {error!r}") from None
