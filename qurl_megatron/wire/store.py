"""The TCP store that the leading training rank hosts: links are made in it, receipts come back.

Nothing here is encrypted or authenticated, as with all of gloo and NCCL: bind the store to an
address that only the cluster reaches.
"""

import socket
from datetime import timedelta

import msgspec
import torch.distributed as dist

from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.wire.message import Receipt
from qurl_megatron.wire.transport import Site, receipt_name


def host_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Host the store in which all ends meet, on a free port of the address ``host`` alone.

    Raises:
        ConfigError: it is not an address of this machine.
    """
    listener = _listen(host)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def check_host(host: str) -> None:
    """Raise ConfigError unless ``host_store`` could have its store there."""
    _listen(host).close()


def join_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Connect to the store; each thread needs a connection, which serves one wait at a time."""
    return dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def store_of(site: Site, host: str) -> dist.TCPStore:
    """Return this rank's end of the store that the leading rank hosts; all ranks call it together.

    Args:
        host: the leading rank's address, where sync.host names none.

    Raises:
        ConfigError: as ``host_store``, on every rank.
    """
    host = site.host or host
    store, failure = None, None
    if site.leads:
        try:
            store = host_store(host, site.timeout_s)
        except ConfigError as error:  # the others must not wait for a port
            failure = error
    port, failure = site.share((store and store.port, failure))
    if failure is not None:
        raise failure
    return store or join_store(host, port, site.timeout_s)


def leave_in(store: dist.TCPStore, receipt: Receipt) -> None:
    """Leave an engine rank's receipt for the leading training rank.

    Raises:
        ConfigError: the store is gone.
    """
    try:
        content = msgspec.json.encode(receipt).decode()
        store.set(receipt_name(receipt.session, receipt.rank), content)
    except RuntimeError as error:
        raise ConfigError(f"the trainer's store is gone: {gist(error)}") from None


def take_from(store: dist.TCPStore, name: str) -> bytes | None:
    """Return a receipt and remove it; None: it is not there yet."""
    if not store.check([name]):
        return None
    content = store.get(name)
    store.delete_key(name)
    return content


def _listen(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0), backlog=1024)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # Python adds the address
        raise ConfigError(
            f"training rank 0 cannot listen at {host!r} for engines ({reason}); set sync.host to "
            "an address of its own machine that they reach, as `ip address` shows them there"
        ) from None


def gist(error: Exception) -> str:
    """Return the cause, without torch's source location and stack."""
    line = str(error).partition("\n")[0]
    return line.partition("] ")[2] if line.startswith("[") else line
