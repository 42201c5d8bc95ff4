"""What the nodes of a run know of each other, where no batch system says it.

The head listens at the run's endpoint. Twice a second every other node sends it a row, what happens
there, and takes back the head's word, what all nodes have to do. Both describe a state, never an
event: one that gets lost, or arrives twice, changes nothing. A node that is not heard from for
``SILENT_S`` is lost, and so is the head for the others.

Nothing is authenticated or encrypted, as between the ranks: use a private network.
"""

import json
import socket
import socketserver
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from qurl_megatron.errors import ConfigError

BEAT_S = 0.5
SILENT_S = 15.0
ASK_S = 5.0
"""That the head may take to answer."""
LOOK_S = 0.05
"""Between looks whether the head has left."""
MOST = 1 << 16
"""Bytes of a row; a word with 1,000 nodes has as many."""


@dataclass(frozen=True)
class Order:
    """An attempt, as every node must know it."""

    number: int
    run_dir: str
    logs: str  # folder of the attempt
    address: str  # where torchrun's agents and the ranks meet
    port: int
    seats: dict[str, int]  # torchrun's --node-rank, by the node's id


@dataclass(frozen=True)
class Word:
    """What the head wants."""

    order: Order | None = None  # the attempt that is on; None: wait
    signals: tuple[int, ...] = ()  # that the ranks get in it, in this order, each once
    over: bool = False  # it has to end at once
    code: int | None = None  # the run is over, and this its exit code
    why: str = ""
    refused: str = ""  # why this node has no part in the run


@dataclass(frozen=True)
class NodeRow:
    """What happens on a node."""

    name: str
    like: dict[str, str]  # what all nodes must have been started with, by option
    attempt: int = 0  # the newest that it has taken part in
    ended: int | None = None  # torchrun's exit code in it
    failed: dict[str, int] = field(default_factory=dict)  # exit codes of ranks that failed
    said: str = ""  # torchrun's last line, where it failed and none of them did
    received: str = ""  # the newest signal that somebody has sent to the script
    refused: str = ""  # why the node cannot take part
    left: bool = False


class Board:
    """Inside, the head listens; where it is alone, at no port."""

    def __init__(self, port: int | None, like: Mapping[str, str]) -> None:
        """
        Raises:
            OSError: the port is taken.
        """
        self.word = Word()
        self._like = dict(like)
        self._heard: dict[str, tuple[NodeRow, float]] = {}
        self._server = None if port is None else _BoardServer(("", port), self)

    @property
    def port(self) -> int:
        assert self._server is not None, "one that is alone listens at none"
        return self._server.server_address[1]

    def __enter__(self) -> "Board":
        if self._server is not None:
            threading.Thread(target=self._server.serve_forever, args=(LOOK_S,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def rows(self, since: float = 0.0) -> dict[str, NodeRow]:
        """Of the nodes that are not silent, by id.

        Args:
            since: monotonic seconds; only those that were heard from after it.
        """
        since = max(since, time.monotonic() - SILENT_S)
        # A copy first: nodes that report meanwhile enter theirs.
        return {node: row for node, (row, at) in [*self._heard.items()] if at > since}

    def answer(self, line: bytes) -> Word:
        """Note a node's row."""
        try:
            node, row = json.loads(line)
            row = NodeRow(**row)
            for option, own in self._like.items():
                if (its := row.like.get(option)) != own:
                    return Word(refused=f"{row.name} was started with {option} {its}, not {own}")
            self._heard[node] = row, time.monotonic()
        except (ValueError, TypeError, AttributeError, RecursionError):
            return Word(refused="it runs another version of this script")
        return self.word


class _BoardServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    request_queue_size = 1024  # all nodes may come at once

    def __init__(self, address: tuple[str, int], board: Board) -> None:
        self.board = board
        super().__init__(address, _Visit)


class _Visit(socketserver.StreamRequestHandler):
    timeout = ASK_S
    server: _BoardServer

    def handle(self) -> None:
        try:
            line = self.rfile.readline(MOST)
            self.wfile.write(json.dumps(asdict(self.server.board.answer(line))).encode() + b"\n")
        except OSError:  # it has left meanwhile, and will ask again
            return


def ask(endpoint: tuple[str, int], node: str, row: NodeRow) -> Word:
    """Bring the head this node's row.

    Returns:
        The head's word.

    Raises:
        OSError: the head does not answer.
        ConfigError: something else does, or the head refuses this node.
    """
    with socket.create_connection(endpoint, timeout=ASK_S) as line, line.makefile("rb") as answer:
        line.sendall(json.dumps([node, asdict(row)]).encode() + b"\n")
        told = answer.readline()
    if not told.endswith(b"\n"):
        raise ConnectionError("the head left in the middle of its answer")
    try:
        value = json.loads(told)
        order = value["order"] and Order(**value["order"])
        word = Word(**{**value, "order": order, "signals": tuple(value["signals"])})
    except (ValueError, TypeError, KeyError):
        where = f"{endpoint[0]}:{endpoint[1]}"
        raise ConfigError(
            f"--rdzv-endpoint: another program answers at {where}; choose another port, on all "
            "nodes"
        ) from None
    if word.refused:
        raise ConfigError(f"the head refuses this node: {word.refused}")
    return word
