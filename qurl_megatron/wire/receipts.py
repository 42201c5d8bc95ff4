"""Receipts as small files, for transports that have no connection to send them back on."""

import contextlib
import os
import time
from pathlib import Path

import msgspec

from qurl_megatron.kit.disk import write_whole
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.kit.record import Malformed, decode, shortened
from qurl_megatron.wire.message import SAME_PACKAGE, Receipt

POLL_S = 0.01
SLOWEST_POLL_S = 1.0


def leave(folder: Path, receipt: Receipt) -> None:
    """Write a receipt whole.

    Raises:
        ConfigError: it cannot be written there.
    """
    path = folder / _name(receipt.session, receipt.rank)
    try:
        write_whole(path, msgspec.json.encode(receipt))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); trainer and engines must share that "
            "folder"
        ) from None


def collect(folder: Path, session: str, ranks: int, wait_s: float) -> list[Receipt]:
    """Take the receipts of a session; one that is not there after ``wait_s`` is an error.

    Names are never used twice, so the first look for one asks the server of a network filesystem,
    and an engine leaves its receipt before it answers. The answer that a name is absent may be
    remembered for a minute, unless the folder is opened again before the next look.
    """
    deadline = time.monotonic() + wait_s
    by_rank: dict[int, Receipt] = {}
    pause_s = POLL_S
    while True:
        for rank in range(ranks):
            if rank in by_rank:
                continue
            path = folder / _name(session, rank)
            with contextlib.suppress(FileNotFoundError):
                by_rank[rank] = received(path.read_bytes(), session, rank)
                path.unlink()
        if len(by_rank) == ranks or time.monotonic() > deadline:
            return [by_rank.get(rank) or missing(session, rank) for rank in range(ranks)]
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, SLOWEST_POLL_S)
        _refresh(folder)


def _refresh(folder: Path) -> None:
    """Clear a network filesystem's cache of a folder's names."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some filesystems have nothing to do for a folder
            os.fsync(opened)
        os.fstat(opened)
    finally:
        os.close(opened)


def received(content: bytes, session: str, rank: int) -> Receipt:
    """Read an engine rank's receipt; nonsense is that engine's error, and no other's."""
    try:
        receipt = decode(Receipt, content)
    except Malformed as error:
        reason = f"an engine left a malformed receipt ({error}); {SAME_PACKAGE}"
        return Receipt(session, rank, reason, 0, 0.0)
    if (receipt.session, receipt.rank) != (session, rank):
        whose = f"of rank {receipt.rank} in {shortened(receipt.session)}"
        return Receipt(session, rank, f"engine rank {rank} left a receipt {whose}", 0, 0.0)
    return receipt


def missing(session: str, rank: int) -> Receipt:
    return Receipt(session, rank, f"engine rank {rank} left no receipt", 0, 0.0)


def _name(session: str, rank: int) -> str:
    return f"{session}-{rank}.json"
