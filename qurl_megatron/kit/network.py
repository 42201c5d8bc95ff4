"""The network that a process is in."""

import socket


def own_address(goal: str) -> str:
    """Return this machine's address on the way to ``goal``, a name or an address; nothing is sent.

    Raises:
        OSError: there is no such name, or no route to it.
    """
    family, kind, _, _, address = socket.getaddrinfo(goal, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
