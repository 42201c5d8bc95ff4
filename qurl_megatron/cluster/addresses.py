"""By what address nodes of a job reach each other, where their names may mean nothing to them."""

import contextlib
import ipaddress
import socket

from qurl_megatron.cluster import commands
from qurl_megatron.kit.network import own_address

OUTWARD = "192.0.2.1"
"""Reserved for documentation: the default route leads there."""


def reachable(node: str) -> str:
    """An address at which other nodes reach this one.

    Args:
        node: Slurm's name of it.

    Returns:
        What the controller has, as an address; where it has a name that this node does not know, or
        knows as itself, the address on the default route; else the name.
    """
    name = commands.node_address(node)
    with contextlib.suppress(OSError):  # no such name
        address = str(socket.getaddrinfo(name, None)[0][4][0])
        if address == name or not ipaddress.ip_address(address).is_loopback:
            return address
    with contextlib.suppress(OSError):  # no default route
        return own_address(OUTWARD)
    return name
