"""What a process has to know of the network that it is in."""

import contextlib
import random
import socket
from pathlib import Path

from qurl_megatron.kit.errors import ConfigError

KERNELS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The first and the last port that the kernel gives away."""


def own_address(goal: str, port: int = 9) -> str:
    """This machine's address on the way to ``goal``, a name or an address; nothing is sent.

    Raises:
        OSError: there is no such name, or no route to it.
    """
    family, kind, _, _, address = socket.getaddrinfo(goal, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def free_port() -> int:
    """A port that nobody has here, for whoever opens it seconds later.

    It is none of those that the kernel gives to processes that ask for any.
    """
    first = int(KERNELS.read_text(encoding="ascii").split()[0])
    own = range(max(1024, first - 8192), first)
    for port in (*random.sample(own, min(64, len(own))), 0):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return probe.getsockname()[1]
    raise ConfigError("no port is free on this node; end what holds them, `ss -ltnp` shows it")
