"""Point to point between real processes: bytes arrive, and nobody waits for the dead or stopped."""

import signal
import time
from datetime import timedelta

import pytest
import torch

from qurl_megatron.errors import ConfigError
from qurl_megatron.rollout.transport import open_receiver
from qurl_megatron.rollout.transport.group import GroupSender, host_store, join_store
from qurl_megatron.rollout.wire import Receipt, checksum, piece_of
from tests.unit.remote import Remote, together

HOST = "127.0.0.1"
TIMEOUT_S = 3.0
LARGE = 64 << 20  # far more than sockets hold


class Trainer:
    """A training rank that sends random codes."""

    def __init__(self, rank: int, port: int, connect_timeout_s: float = 20.0) -> None:
        self.sender = GroupSender(
            join_store(HOST, port, 20.0),
            rank,
            2,
            timeout_s=TIMEOUT_S,
            connect_timeout_s=connect_timeout_s,
            receipt_wait_s=1.0,
        )
        self.rank = rank

    def put(self, index, tp, size):
        return [
            self.sender.put(index, codes(self.rank, index, tp, r, size), to=(tp, r))
            for r in range(tp)
        ]

    def __getattr__(self, name):
        return getattr(self.sender, name)

    def finish(self):
        self.sender.finish(keep=1)


class Engine:
    """A tensor rank of an engine."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def open(self, transport):
        self.receiver = open_receiver(transport, self.rank)

    def fetch(self, blob):
        memory = self.receiver.fetch(blob)
        assert all(checksum(piece_of(memory, p)) == p.checksum for p in blob.pieces)
        return memory.numpy().tobytes() if blob.bytes < 1 << 20 else checksum(memory)

    def report(self, session):
        self.receiver.report(Receipt(session, self.rank, None, 7, 0.5))

    def close(self):
        self.receiver.close()


def codes(rank, index, tp, engine_rank, size):
    generator = torch.Generator().manual_seed(rank * 1000 + index * 100 + tp * 10 + engine_rank)
    weight = torch.randint(-127, 128, (size // 64, 64), dtype=torch.int8, generator=generator)
    scale = torch.rand(3, 1, generator=generator)
    return [("weight", weight, 0, 5), ("scale", scale, None, 0)]


@pytest.fixture
def cast():
    """Makes processes; ends them all."""
    made = []
    store = host_store(HOST, 20.0)

    def remote(make, *args):
        made.append(Remote(make, *args))
        return made[-1]

    def trainers(**options):
        return [remote(Trainer, rank, store.port, *options.values()) for rank in range(2)]

    remote.trainers = trainers
    yield remote
    for each in made:
        each.end()


def connect(trainers, engines):
    """``engines``: name -> its ranks."""
    together(trainers, "begin", 1)
    for name, ranks in engines.items():
        transport = trainers[0].call("describe", name)
        for rank in ranks:
            rank.start("open", transport)
    sizes = {name: len(ranks) for name, ranks in engines.items()}
    failures = together(trainers, "connect", sizes)
    assert failures == [{}, {}]
    for ranks in engines.values():
        for rank in ranks:
            rank.result()


def test_every_engine_rank_gets_the_bytes_that_are_its_own(cast):
    trainers, engine = cast.trainers(), [cast(Engine, rank) for rank in range(2)]
    for version in (1, 2):  # anew for every version
        connect(trainers, {"http://a:1": engine})
        for index in range(4):
            size = 64 * (10 + 5 * (index % 3))
            blobs = together(trainers, "put", index, 2, size)
            together(trainers, "deliver", index)
            for source, theirs in enumerate(blobs):
                arrived = [e.start("fetch", blob) for e, blob in zip(engine, theirs, strict=True)]
                for rank, (e, blob) in enumerate(zip(arrived, theirs, strict=True)):
                    memory = torch.frombuffer(bytearray(e.result()), dtype=torch.uint8)
                    sent = codes(source, index, 2, rank, size)
                    for piece, (name, tensor, dim, start) in zip(blob.pieces, sent, strict=True):
                        assert (piece.name, piece.dim, piece.start) == (name, dim, start)
                        assert torch.equal(piece_of(memory, piece), tensor)
        assert together(trainers, "settle") == [{}, {}]
        together(engine, "report", f"v{version}")
        receipts = trainers[0].call("receipts", f"v{version}", 2)
        assert [(r.rank, r.error, r.bytes) for r in receipts] == [(0, None, 7), (1, None, 7)]
        together(trainers, "finish")
        together(engine, "close")


def test_a_receipt_that_nobody_left_is_an_error_in_its_place(cast):
    trainers, engine = cast.trainers(), [cast(Engine, rank) for rank in range(2)]
    connect(trainers, {"a": engine})
    engine[1].call("report", "v1")
    lost, there = trainers[0].call("receipts", "v1", 2)
    assert "rank 0 left no receipt" in lost.error and there.error is None


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_an_engine_that_is_lost_in_mid_transfer_is_dropped_and_the_other_served(cast, number):
    trainers = cast.trainers()
    lost, well = cast(Engine, 0), cast(Engine, 0)
    connect(trainers, {"lost": [lost], "well": [well]})
    blobs = together(trainers, "put", 0, 1, LARGE)
    together(trainers, "deliver", 0)
    lost.call("fetch", blobs[0][0])  # the first rank's is through, the second's is on its way
    lost.signal(number)
    begun = time.monotonic()
    for blob in blobs:
        well.call("fetch", blob[0])
    failures = together(trainers, "settle")
    assert time.monotonic() - begun < TIMEOUT_S + 5
    assert failures[0] == {} and failures[1].keys() == {"lost"}
    assert "training rank 1 within 3 s" in failures[1]["lost"]

    trainers[0].call("drop", "lost")  # as the lead tells all
    blobs = together(trainers, "put", 1, 1, LARGE)
    together(trainers, "deliver", 1)
    for blob in blobs:
        well.call("fetch", blob[0])
    assert together(trainers, "settle")[0] == {}


def test_a_bucket_that_is_still_on_its_way_is_not_overwritten(cast):
    trainers, engine = cast.trainers(), cast(Engine, 0)
    connect(trainers, {"a": [engine]})
    (blob,) = trainers[0].call("put", 0, 1, 64000)  # goes when the engine asks for it
    trainers[0].call("deliver", 0)
    trainers[0].start("put", 2, 1, 64000)  # into the same memory
    time.sleep(0.5)
    engine.call("fetch", blob)  # compares the checksum
    trainers[0].result()


def test_an_engine_started_anew_takes_part_in_the_next_version(cast):
    trainers, first = cast.trainers(), cast(Engine, 0)
    connect(trainers, {"a": [first]})
    first.signal(signal.SIGKILL)
    together(trainers, "put", 0, 1, LARGE)
    together(trainers, "deliver", 0)
    assert all("a" in failures for failures in together(trainers, "settle"))
    second = cast(Engine, 0)
    connect(trainers, {"a": [second]})
    blobs = together(trainers, "put", 0, 1, LARGE)
    together(trainers, "deliver", 0)
    for blob in blobs:
        second.call("fetch", blob[0])
    assert together(trainers, "settle") == [{}, {}]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_training_rank_that_is_lost_ends_the_wait_of_the_engine(cast, number):
    trainers, engine = cast.trainers(), cast(Engine, 0)
    connect(trainers, {"a": [engine]})
    blobs = together(trainers, "put", 0, 1, LARGE)
    together(trainers, "deliver", 0)
    trainers[1].signal(number)
    engine.call("fetch", blobs[0][0])
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=r"training rank 1 did not send 67.1 MB within 3 s"):
        engine.call("fetch", blobs[1][0])
    assert time.monotonic() - begun < TIMEOUT_S + 5


def test_an_engine_that_does_not_come_keeps_the_others_waiting_no_longer_than_agreed(cast):
    trainers = cast.trainers(connect_timeout_s=4.0)
    well = cast(Engine, 0)
    together(trainers, "begin", 1)
    well.start("open", trainers[0].call("describe", "well"))
    begun = time.monotonic()
    failures = together(trainers, "connect", {"absent": 2, "well": 1})
    assert time.monotonic() - begun < 15
    for rank, failure in enumerate(failures):
        assert failure.keys() == {"absent"}
        assert f"training rank {rank} could not reach its 2 ranks within 4 s" in failure["absent"]
    well.result()
    blobs = together(trainers, "put", 0, 1, 640)
    together(trainers, "deliver", 0)
    assert len(well.call("fetch", blobs[1][0])) == blobs[1][0].bytes


def test_an_engine_alone_waits_for_the_training_ranks_no_longer_than_agreed(cast):
    trainers = cast.trainers(connect_timeout_s=2.0)
    together(trainers, "begin", 1)
    transport = trainers[0].call("describe", "a")
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="engine rank 0 could not meet the training ranks at"):
        cast(Engine, 0).call("open", transport)
    assert time.monotonic() - begun < 15


def test_the_store_is_bound_to_the_given_address_alone():
    import socket

    store = host_store(HOST, 5.0)
    store.set_timeout(timedelta(seconds=1))
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", store.port), timeout=1)
