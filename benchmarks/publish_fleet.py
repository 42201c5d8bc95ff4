"""Seconds of a version over ``group`` to 4 and to 64 engines, and what two trainers send for it.

Every training rank and every engine is a network namespace of this machine (root makes them), with
a link of ``--gbit`` of its own, as a GPU of a cluster has one. Engines are the transport's ends
alone: they fetch, verify and pass on, and have no model. The ways are:

    chains    as a run publishes: two engines get the version from the training ranks, the others
              from the engine before them
    direct    training ranks send to each engine

The limit is what one engine's link needs for the version.

    python -m benchmarks.publish_fleet --out DIR
"""

import argparse
import ctypes
import os
import sys
import tempfile
import time
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.harness import measure as record_of
from benchmarks.harness import parser_of
from benchmarks.network import CannotMake, Node, network
from qurl_megatron.bench.command import count
from qurl_megatron.bench.record import Case, Figure, in_turns, progress
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.wire import group
from qurl_megatron.wire.message import Blob, Turn, checksum, in_turn, piece_of
from qurl_megatron.wire.session import open_receiver
from qurl_megatron.wire.store import host_store, join_store
from qurl_megatron.wire.transport import Receiver

TRAINERS = 2
BUCKETS = 2
CHUNK = 1 << 16  # in proportion to these buckets
PATIENCE_S = 600.0
ADDRESS = "10.77.0.1"  # of the leading training rank


def parser() -> argparse.ArgumentParser:
    options = parser_of("publish_fleet", __doc__)
    options.set_defaults(repeats=1)
    add = options.add_argument
    add("--engines", type=count, nargs="+", default=[4, 64], metavar="N")
    add("--gbit", type=float, default=0.02, metavar="N", help="a link's rate; default 0.02")
    add("--megabytes", type=count, default=16, metavar="N", help="of a version; default 16")
    return options


class TrainingRank:
    def __init__(self, rank: int, port: int, *, direct: bool, bucket: int) -> None:
        group.CHUNK = CHUNK
        if direct:
            group.chains_of = lambda engines, *_: [[name] for name in engines]
        if rank == 0:
            store = host_store(ADDRESS, PATIENCE_S)
        else:
            store = join_store(ADDRESS, port, PATIENCE_S)
        self._sender = group.GroupSender(
            store, rank, TRAINERS, timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S
        )
        codes = torch.randint(-127, 128, (bucket // TRAINERS // 64, 64), dtype=torch.int8)
        self._part = Shard("weight", codes, (len(codes) * TRAINERS, 64), 0, rank * len(codes))

    def port(self) -> int:
        return self._sender.store.port

    def begin(self, engines: dict[str, int]) -> list[tuple[dict[str, Any], Turn]]:
        self._sender.begin(1)
        turns = self._sender.arrange(engines)
        return [(self._sender.describe(name, 1), turns[name]) for name in engines]

    def connect(self, engines: dict[str, int]) -> None:
        if failures := self._sender.connect(engines):
            raise ConfigError(f"training ranks reach no {next(iter(failures.items()))}")

    def put(self, index: int) -> Blob:
        return self._sender.put(index, [self._part], to=(1, 0))

    def deliver(self, index: int) -> None:
        self._sender.deliver(index)

    def settle(self) -> None:
        if failures := self._sender.settle():
            raise ConfigError(f"not delivered: {next(iter(failures.items()))}")
        self._sender.finish()

    def sent(self) -> int:
        """Return the bytes that have left this node."""
        return psutil.net_io_counters(pernic=True)["eth0"].bytes_sent


class Engine:
    def __init__(self) -> None:
        self._receiver: Receiver | None = None

    def open(self, transport: dict[str, Any], turn: Turn) -> None:
        self._turn = turn
        if self._receiver is None or not self._receiver.follow(transport):
            self._receiver = open_receiver(transport, 0)

    def fetch(self, blobs: list[Blob]) -> None:
        assert self._receiver is not None
        for blob in in_turn(blobs, self._turn):
            memory = self._receiver.fetch(blob)
            for piece in blob.pieces:
                if checksum(piece_of(memory, piece)) != piece.checksum:
                    raise ConfigError(f"{piece.name} is damaged")


class Member:
    """A training rank or an engine, in a process in a node."""

    def __init__(self, node: Node, make: Any) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.publish_fleet"])
        self._process = ProcessPoolExecutor(
            1, mp_context=context, initializer=_be, initargs=(node.pid, make)
        )

    def start(self, method: str, *arguments: Any) -> Future:
        return self._process.submit(_call, method, *arguments)

    def close(self) -> None:
        self._process.shutdown(cancel_futures=True)


_itself: Any = None  # in a member's process


def _be(pid: int, make: Any) -> None:
    global _itself
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns")
    torch.set_num_threads(1)
    _itself = make()


def _call(method: str, *arguments: Any) -> Any:
    return getattr(_itself, method)(*arguments)


def together(members: list[Member], method: str, *arguments: Any) -> list:
    return [future.result() for future in [m.start(method, *arguments) for m in members]]


class Fleet:
    """Training ranks of one way, with engines that have come to them."""

    def __init__(
        self, stack: ExitStack, nodes: list[Node], *, engines: int, direct: bool, bucket: int
    ) -> None:
        def member(node: Node, make: Any) -> Member:
            made = Member(node, make)
            stack.callback(made.close)
            return made

        rank = partial(TrainingRank, direct=direct, bucket=bucket)
        self._trainers = [member(nodes[0], partial(rank, 0, 0))]
        port = self._trainers[0].start("port").result()
        self._trainers += [
            member(node, partial(rank, place, port))
            for place, node in enumerate(nodes[1:TRAINERS], start=1)
        ]
        self._engines = [member(node, Engine) for node in nodes[TRAINERS : TRAINERS + engines]]
        self._names = {f"engine{place}": 1 for place in range(engines)}

    def publish(self) -> dict[str, float]:
        """Send a version; return its seconds and the bytes that left a training rank."""
        described = together(self._trainers, "begin", self._names)[0]
        opening = [
            engine.start("open", *about)
            for engine, about in zip(self._engines, described, strict=True)
        ]
        together(self._trainers, "connect", self._names)
        for future in opening:
            future.result()
        sent, start = max(together(self._trainers, "sent")), time.perf_counter()
        loading: list[Future] = []
        for index in range(BUCKETS):
            blobs = together(self._trainers, "put", index)
            for future in loading:
                future.result()
            loading = [engine.start("fetch", blobs) for engine in self._engines]
            together(self._trainers, "deliver", index)
        for future in loading:
            future.result()
        seconds = time.perf_counter() - start
        together(self._trainers, "settle")
        return {"seconds": seconds, "sent": max(together(self._trainers, "sent")) - sent}


def run(options: argparse.Namespace) -> list[Case]:
    """Return a case per way and number of engines.

    Raises:
        ConfigError: this machine makes no network namespaces.
    """
    names = [f"n{place}" for place in range(TRAINERS + max(options.engines))]
    version = options.megabytes * 10**6
    limit_s = version * 8 / 1e9 / options.gbit
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="publish-fleet-") as folder:
        try:
            with network(Path(folder), *names) as nodes:
                for node in nodes:
                    rate = ["rate", f"{options.gbit}gbit", "burst", "64kb", "latency", "50ms"]
                    node.do("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)
                for engines in options.engines:
                    cases += _cases(nodes, engines, version, limit_s, options)
        except CannotMake as error:
            raise ConfigError(f"no nodes can be made here: {error}") from None
    return cases


def _cases(
    nodes: list[Node], engines: int, version: int, limit_s: float, options: argparse.Namespace
) -> list[Case]:
    cases = []
    for way in ("chains", "direct"):
        with ExitStack() as stack:
            fleet = Fleet(
                stack,
                nodes,
                engines=engines,
                direct=way == "direct",
                bucket=version // BUCKETS,
            )
            turns = in_turns(
                {way: fleet.publish},
                repeats=options.repeats,
                warm_up=1,
                seen=lambda name, turn: progress(f"{engines}, {name}: {turn['seconds']:.2f} s"),
            )[way]
        seconds = Figure(
            name="seconds",
            unit="s",
            better="lower",
            repeats=[turn["seconds"] for turn in turns],
            limit=limit_s,
            limit_of="an engine's link",
        )
        sent = Figure(
            name="left a training rank",
            unit="MB",
            better="lower",
            repeats=[turn["sent"] / 1e6 for turn in turns],
        )
        keys = {"engines": engines, "way": way, "gbit": options.gbit}
        notes = {"version_mb": version / 1e6, "training_ranks": TRAINERS}
        cases.append(
            Case(name=f"{engines}, {way}", keys=keys, figures=[seconds, sent], notes=notes)
        )
    return cases


if __name__ == "__main__":
    sys.exit(record_of("publish_fleet", parser().parse_args(), run))
