"""Receipts as small files, for the transports that have no connection to send them back on."""

import os
import time
from pathlib import Path

from qurl_megatron.errors import ConfigError
from qurl_megatron.rollout.wire import Receipt

POLL_S = 0.01


def leave(folder: Path, receipt: Receipt) -> None:
    """Write one aside and rename it: whoever finds it finds all of it.

    Raises:
        ConfigError: it cannot be written there.
    """
    path = folder / _name(receipt.session, receipt.rank)
    aside = path.with_suffix(".tmp")
    try:
        aside.write_text(receipt.to_json(), encoding="utf-8")
        aside.rename(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); trainer and engines must share that "
            "folder"
        ) from None


def collect(folder: Path, session: str, ranks: int, wait_s: float) -> list[Receipt]:
    """Take the receipts of a session; one that is not there after ``wait_s`` is an error."""
    deadline = time.monotonic() + wait_s
    found: dict[int, Receipt] = {}
    while len(found) < ranks:
        # A listing asks the server of a network filesystem; a look for one name may be answered
        # from what this machine remembers.
        names = set(os.listdir(folder))
        for rank in set(range(ranks)) - found.keys():
            name = _name(session, rank)
            if name in names:
                found[rank] = Receipt.from_json((folder / name).read_text(encoding="utf-8"))
                (folder / name).unlink()
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return [found.get(rank) or missing(session, rank) for rank in range(ranks)]


def missing(session: str, rank: int) -> Receipt:
    return Receipt(session, rank, f"engine rank {rank} left no receipt", 0, 0.0)


def _name(session: str, rank: int) -> str:
    return f"{session}-{rank}.json"
