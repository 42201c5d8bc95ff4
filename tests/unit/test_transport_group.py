"""Point to point between real processes: bytes arrive, and nobody waits for the dead or stopped."""

import contextlib
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from qurl_megatron.fleet.fleet import EngineRecord
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.publish.publisher import Publisher, refuse_whole_experts
from qurl_megatron.wire import group, link, transport
from qurl_megatron.wire.group import GroupSender
from qurl_megatron.wire.link import WATCHDOG, Link, LinkError, unwatched, within
from qurl_megatron.wire.message import Blob, Receipt, checksum, piece_of
from qurl_megatron.wire.session import open_receiver
from qurl_megatron.wire.store import host_store, join_store
from qurl_megatron.wire.transport import Site
from tests.support.remote import Remote, together
from tests.support.shards import shard
from tests.support.waiting import PATIENCE_S

HOST = "127.0.0.1"
TIMEOUT_S = 3.0
LARGE = 64 << 20  # far more than sockets hold


GPUS = 8  # of the longest cast
BACKENDS = [
    "gloo",
    pytest.param(
        "nccl",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(torch.cuda.device_count() < GPUS, reason=f"needs {GPUS} GPUs"),
        ],
    ),
]


def test_an_engine_with_whole_experts_on_its_ranks_is_refused():
    refuse_whole_experts([EngineRecord("one", tp=2)])
    with pytest.raises(ConfigError, match="transport=group cuts .*ep_size = 2; start it without"):
        refuse_whole_experts([EngineRecord("one", tp=2), EngineRecord("two", tp=2, ep=2)])


class Trainer:
    """A training rank that sends random codes."""

    def __init__(
        self, device, rank: int, port: int, size: int = 2, timeout_s: float = TIMEOUT_S
    ) -> None:
        use(device)
        self.sender = GroupSender(
            join_store(HOST, port, 20.0),
            rank,
            size,
            device=device,
            timeout_s=timeout_s,
            connect_timeout_s=20.0,
        )
        self.rank = rank

    def put(self, index, tp, size):
        return [
            self.sender.put(index, codes(self.rank, index, tp, r, size), to=(tp, r))
            for r in range(tp)
        ]

    def __getattr__(self, name):
        return getattr(self.sender, name)

    def links(self):
        return {name: link.id for name, link in self.sender._links.items()}


class Engine:
    """A tensor rank of an engine."""

    def __init__(self, device, rank: int, protocol: str = transport.FORMAT) -> None:
        use(device)
        self.rank, self.receiver = rank, None
        transport.FORMAT = protocol

    def open(self, transport):
        if self.receiver is None or not self.receiver.follow(transport):
            self.receiver = open_receiver(transport, self.rank)

    def fetch(self, blob):
        memory = self.receiver.fetch(blob)
        assert all(checksum(piece_of(memory, p)) == p.checksum for p in blob.pieces)
        memory = memory.cpu()
        return memory.numpy().tobytes() if blob.bytes < 1 << 20 else checksum(memory)

    def links(self):
        ends = self.receiver._link, self.receiver._onward
        return [link and link.id for link in ends]

    def report(self, session):
        self.receiver.report(Receipt(session, self.rank, None, 7, 0.5))

    def close(self):
        self.receiver.close()
        self.receiver = None


def codes(rank, index, tp, engine_rank, size):
    generator = torch.Generator().manual_seed(rank * 1000 + index * 100 + tp * 10 + engine_rank)
    weight = torch.randint(-127, 128, (size // 64, 64), dtype=torch.int8, generator=generator)
    scale = torch.rand(3, 1, generator=generator)
    return [shard("weight", weight, 0, 5), shard("scale", scale)]


def use(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


@pytest.fixture(params=BACKENDS)
def cast(request):
    """Makes processes, over NCCL each on a GPU of its own; ends them all."""
    made = []
    store = host_store(HOST, 20.0)

    def remote(make, *args):
        gpu = torch.device("cuda", len(made))
        made.append(Remote(make, gpu if request.param == "nccl" else torch.device("cpu"), *args))
        return made[-1]

    remote.port = store.port
    remote.trainers = lambda: [remote(Trainer, rank, store.port) for rank in range(2)]
    yield remote
    for each in made:
        each.end()


def connect(trainers, engines):
    """``engines``: name -> its ranks."""
    together(trainers, "begin", 1)
    trainers[0].call("arrange", {name: len(ranks) for name, ranks in engines.items()})
    for name, ranks in engines.items():
        transport = trainers[0].call("describe", name, len(ranks))
        for rank in ranks:
            rank.start("open", transport)
    sizes = {name: len(ranks) for name, ranks in engines.items()}
    failures = together(trainers, "connect", sizes)
    assert failures == [{}] * len(trainers)
    for ranks in engines.values():
        for rank in ranks:
            rank.result()


def send(trainers, index, tp, size):
    """Begin to send a bucket from every training rank; return each one's blobs."""
    blobs = together(trainers, "put", index, tp, size)
    together(trainers, "deliver", index)
    return blobs


def test_every_engine_rank_gets_the_bytes_that_are_its_own(cast):
    trainers, engine = cast.trainers(), [cast(Engine, rank) for rank in range(2)]
    connect(trainers, {"http://a:1": engine})
    for index in range(4):
        size = 64 * (10 + 5 * (index % 3))
        blobs = send(trainers, index, 2, size)
        for source, theirs in enumerate(blobs):
            arrived = [e.start("fetch", blob) for e, blob in zip(engine, theirs, strict=True)]
            for rank, (e, blob) in enumerate(zip(arrived, theirs, strict=True)):
                memory = torch.frombuffer(bytearray(e.result()), dtype=torch.uint8)
                sent = codes(source, index, 2, rank, size)
                for piece, part in zip(blob.pieces, sent, strict=True):
                    place = piece.name, piece.dim, piece.start
                    assert place == (part.name, part.dim, part.start)
                    assert torch.equal(piece_of(memory, piece), part.value)
    assert together(trainers, "settle") == [{}, {}]
    together(engine, "report", "v1")
    receipts = trainers[0].call("receipts", "v1", 2)
    assert [(r.rank, r.error, r.bytes) for r in receipts] == [(0, None, 7), (1, None, 7)]
    engine[1].call("report", "again")
    lost, there = trainers[0].call("receipts", "again", 2)
    assert "rank 0 left no receipt" in lost.error and there.error is None


FIVE = dict.fromkeys("abcde", 1)


@pytest.mark.parametrize(
    "engines,senders,expected",
    [
        ({"a": 2, "b": 2}, 4, ["a", "b"]),
        ({"a": 2, "b": 2, "c": 2}, 4, ["ac", "b"]),
        (FIVE, 2, ["ace", "bd"]),
        ({"a": 8, "b": 1, "c": 8}, 4, ["ac", "b"]),
    ],
    ids=["enough", "one-more", "two-chains", "equals-alone"],
)
def test_training_ranks_feed_as_many_engines_as_they_can_and_these_the_others(
    engines, senders, expected
):
    assert group.chains_of(engines, senders) == [list(chain) for chain in expected]


@pytest.mark.parametrize("bad", "abcd")
def test_an_engine_that_fails_in_every_version_takes_others_along_once(bad):
    sender = GroupSender(host_store(HOST, 20.0), 0, 1)
    missed = []
    for version in range(3):
        sender.begin(version)
        sender.arrange(dict.fromkeys("abcd", 1))
        route = {name: sender.describe(name, 1)["route"] for name in "abcd"}
        lost, name = [], bad
        while name:
            lost.append(name)
            name = route[name]["to"]
        for engine in lost:
            sender.drop(engine)
        missed.append(lost)
        if len(lost) < 4:
            sender.finish()
    assert missed[0] == list("abcd"["abcd".index(bad) :]) and missed[1:] == [[bad], [bad]]


def test_engines_of_a_chain_fetch_in_its_firsts_order_and_no_two_firsts_in_the_same():
    sender = GroupSender(host_store(HOST, 20.0), 0, 4)
    turns = sender.arrange({"a": 1, "b": 2, "c": 1, "d": 1, "e": 2, "f": 1})
    assert turns == {"a": (0, 2), "c": (1, 2), "d": (0, 2), "f": (1, 2), "b": (0, 1), "e": (0, 1)}


def test_an_engine_waits_the_shorter_for_the_next_the_fewer_are_behind():
    sender = GroupSender(host_store(HOST, 20.0), 0, 2, timeout_s=9.0)
    sender.arrange(FIVE)
    patience = {e: sender.describe(e, 1)["route"]["patience_s"] for e in "abcde"}
    assert patience == {"a": 6.0, "b": 4.5, "c": 3.0, "d": 0.0, "e": 0.0}


def carry(trainers, engines, index=0, size=640):
    """One bucket to every engine, and whole."""
    tps = {len(ranks) for ranks in engines}
    blobs = {tp: together(trainers, "put", index, tp, size) for tp in tps}
    together(trainers, "deliver", index)
    for ranks in engines:
        for theirs in blobs[len(ranks)]:
            for engine, blob in zip(ranks, theirs, strict=True):
                engine.call("fetch", blob)
    assert together(trainers, "settle") == [{}, {}]
    together(trainers, "finish")


def test_links_stay_open_from_version_to_version_until_an_engine_goes_or_is_another(cast):
    trainers = cast.trainers()
    pair, single = [cast(Engine, 0), cast(Engine, 1)], [cast(Engine, 0)]
    for _ in range(3):
        connect(trainers, {"pair": pair, "single": single})
        for index in range(3):
            carry(trainers, [pair, single], index)
    first = together(trainers, "links")
    assert first[0] == first[1] == {"pair": "pair/1", "single": "single/1"}

    single[0].signal(signal.SIGKILL)
    connect(trainers, {"pair": pair})
    carry(trainers, [pair])
    assert together(trainers, "links") == [{"pair": "pair/1"}] * 2
    single = [cast(Engine, 0)]  # another process under the old name
    connect(trainers, {"pair": pair, "single": single})
    carry(trainers, [pair, single])
    assert together(trainers, "links") == [{"pair": "pair/1", "single": "single/5"}] * 2


def fetch_all(engines, blobs):
    """Every engine's answer for each blob, or the mistake."""

    def fetch(engine):
        answers = []
        for (blob,) in blobs:
            try:
                answers.append(engine.call("fetch", blob))
            except ConfigError as error:
                answers.append(str(error))
        return answers

    with ThreadPoolExecutor(len(engines)) as pool:
        return dict(zip(engines, pool.map(fetch, engines.values()), strict=True))


def test_engines_behind_others_get_what_training_ranks_send_once_and_keep_their_links(cast):
    trainers = [cast(Trainer, rank, cast.port, 2, PATIENCE_S) for rank in range(2)]
    engines = {name: cast(Engine, 0) for name in FIVE}
    for version in range(3):
        if version == 2:  # another process under the old name, in the middle of a chain
            engines["c"].signal(signal.SIGKILL)
            engines["c"] = cast(Engine, 0)
        connect(trainers, {name: [engine] for name, engine in engines.items()})
        for index in range(4):
            size = 64 * (10 + 5 * (index % 3))
            blobs = send(trainers, index, 1, size)
            got = fetch_all(engines, blobs)
            assert all(answers == got["a"] for answers in got.values())
            for source, ((blob,), data) in enumerate(zip(blobs, got["a"], strict=True)):
                memory = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                sent, _ = codes(source, index, 1, 0, size)
                assert torch.equal(piece_of(memory, blob.pieces[0]), sent.value)
        assert together(trainers, "settle") == [{}, {}]
        together(trainers, "finish")
        assert together(trainers, "links") == [{"a": "a/1", "b": "b/1"}] * 2
        links = {name: engine.call("links") for name, engine in engines.items()}
        if version < 2:
            assert links["a"] == ["a/1", "c/rank0/1"] and links["c"] == ["c/rank0/1", "e/rank0/1"]
        else:
            assert links["a"] == ["a/1", "c/rank0/3"] and links["c"] == ["c/rank0/3", "e/rank0/3"]
        assert links["b"] == ["b/1", "d/rank0/1"] and links["d"] == ["d/rank0/1", None]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_an_engine_lost_in_a_chain_takes_those_behind_it_along_for_one_version(cast, number):
    trainers = [cast(Trainer, 0, cast.port, 1, 9.0)]
    engines = {name: cast(Engine, 0) for name in "abc"}
    connect(trainers, {name: [engine] for name, engine in engines.items()})
    begun = time.monotonic()
    engines.pop("b").signal(number)
    for index in range(4):  # more than are passed on at a time
        blobs = send(trainers, index, 1, LARGE)
        got = fetch_all(engines, blobs)
        assert re.fullmatch("[0-9a-f]{32}", *got["a"])
        if index == 0:
            assert got["c"][0].startswith("b did not send 67.1 MB within 9 s")
    assert together(trainers, "settle") == [{}]
    assert time.monotonic() - begun < TIMEOUT_S + PATIENCE_S

    for lost in "bc":  # as the lead tells all
        trainers[0].call("drop", lost)
    together(trainers, "finish")
    for _ in range(2):
        connect(trainers, {name: [engine] for name, engine in engines.items()})
        carry_side_by_side(trainers, engines)
    assert engines["a"].call("links") == ["a/1", "c/rank0/2"]
    assert engines["c"].call("links") == ["c/rank0/2", None]


class Way:
    """A link on which bytes go only when they are waited for, and are there at once."""

    ranks = 1

    def __init__(self) -> None:
        self.sending, self.deadline, self.gone = {}, {}, []

    def send(self, messages, tag):
        return [memory for _, memory in messages]

    def sent(self, index):
        self.gone += [memory.clone() for memory in self.sending.pop(index, ())]

    def receive(self, messages, tag):
        return []

    def abort(self):
        pass


def test_the_next_engine_has_its_time_for_the_only_bucket_of_every_version():
    sender = GroupSender(host_store(HOST, 20.0), 0, 1, connect_timeout_s=0.2)
    sender.arrange(dict.fromkeys("abc", 1))
    receiver = open_receiver(sender.describe("b", 1), 0)
    for _ in range(2):
        assert receiver.follow(sender.describe("b", 1))
        receiver._link, receiver._onward = Way(), Way()
        now = time.monotonic()
        receiver.fetch(Blob({"source": 0, "index": 0}, 64, ()))
        assert min(receiver._onward.deadline.values()) > now + sender.timeout_s / 4
        receiver._pass_deadline = 0.0  # long ago


def test_bytes_that_an_engine_did_not_fetch_are_not_the_next_versions(cast):
    trainers = [cast(Trainer, 0, cast.port, 1, PATIENCE_S)]
    engines = {name: cast(Engine, 0) for name in "ab"}
    connect(trainers, {name: [engine] for name, engine in engines.items()})
    blobs = send(trainers, 0, 1, 640)
    engines["a"].call("fetch", blobs[0][0])  # and passes it on to b, which is not asked for it
    trainers[0].call("drop", "b")
    together(trainers, "finish")
    connect(trainers, {name: [engine] for name, engine in engines.items()})
    carry_side_by_side(trainers, engines)
    assert engines["b"].call("links") == ["b/rank0/2", None]


def test_an_engine_that_the_one_before_never_meets_says_so_when_it_fetches():
    sender = GroupSender(host_store(HOST, 20.0), 0, 1, connect_timeout_s=0.2)
    sender.arrange({"a": 1, "b": 1, "c": 1})
    receiver = open_receiver(sender.describe("b", 1), 0)
    with pytest.raises(ConfigError, match="rank 0 could not meet a within 0.2 s: rank 0 of a did"):
        receiver.fetch(Blob({"source": 0, "index": 0}, 64, ()))


def carry_side_by_side(trainers, engines):
    blobs = send(trainers, 0, 1, 1280)
    got = fetch_all(engines, blobs)
    assert all(answers == got["a"] and len(answers[0]) > 1280 for answers in got.values())
    assert together(trainers, "settle") == [{}] * len(trainers)
    together(trainers, "finish")


def test_two_trainers_on_one_network_keep_apart_at_once_and_under_equal_names(cast):
    store = host_store(HOST, 20.0)
    runs = [
        (cast.trainers(), [cast(Engine, 0)], 640),
        ([cast(Trainer, rank, store.port) for rank in range(2)], [cast(Engine, 0)], 1280),
    ]

    def publish(trainers, engine, size):
        for index in range(4):
            connect(trainers, {"a": engine})
            carry(trainers, [engine], index, size)
        return together(trainers, "links")

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(publish, *zip(*runs, strict=True))) == [[{"a": "a/1"}] * 2] * 2


def test_a_link_with_an_abandoned_version_or_dropped_by_one_end_is_opened_anew_by_all(cast):
    trainers, engine = cast.trainers(), [cast(Engine, 0), cast(Engine, 1)]
    connect(trainers, {"a": engine})
    carry(trainers, [engine])
    connect(trainers, {"a": engine})
    together(trainers, "put", 7, 2, 640)
    together(trainers, "deliver", 7)  # and nobody asks for it
    connect(trainers, {"a": engine})
    assert together(trainers, "links") == [{"a": "a/3"}] * 2
    carry(trainers, [engine], 7, 1280)
    trainers[1].call("drop", "a")
    connect(trainers, {"a": engine})
    carry(trainers, [engine])
    engine[1].call("close")
    connect(trainers, {"a": engine})
    carry(trainers, [engine])
    assert together(trainers, "links") == [{"a": "a/5"}] * 2


def test_an_engine_of_another_version_of_the_package_is_refused_in_a_sentence(cast):
    trainers, old, well = cast.trainers(), cast(Engine, 0, "qurl-update-0"), [cast(Engine, 0)]
    together(trainers, "begin", 1)
    for name, engine in (("old", old), ("well", well[0])):
        engine.start("open", trainers[0].call("describe", name, 1))
    sentence = (
        rf"the trainer has protocol {transport.FORMAT} \(torch .*\), the engine protocol "
        r"qurl-update-0 \(torch .*\), and their messages are incompatible; install the same "
        "version of qurl-megatron in both environments"
    )
    for failures in together(trainers, "connect", {"old": 1, "well": 1}):
        assert failures.keys() == {"old"} and re.fullmatch(sentence, failures["old"])
    with pytest.raises(ConfigError, match=sentence):
        old.result()
    well[0].result()
    (blob,) = trainers[0].call("put", 0, 1, 640)
    trainers[0].call("deliver", 0)
    well[0].call("fetch", blob)


SAME = {
    "protocol": "1",
    "torch": "2.13.0",
    "nccl": "2.27.5",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}


@pytest.mark.parametrize(
    "kind,changes,expected",
    [
        ("nccl", {"torch": "2.14.1", "nccl": "2.28.3"}, r"nccl 2.27.5 .* nccl 2.28.3 .*transport"),
        ("nccl", {"NCCL_CUMEM_ENABLE": "unset"}, "NCCL_CUMEM_ENABLE 0 .*ENABLE unset .*start"),
        ("nccl", {"NCCL_NVLS_ENABLE": "1"}, "NCCL_NVLS_ENABLE"),
        ("gloo", {"nccl": "2.28.3", "NCCL_CUMEM_ENABLE": "1", "torch": "2.14.1"}, None),
        ("memory", {"protocol": "0"}, "protocol 1 .*protocol 0 .*install the same version"),
    ],
)
def test_two_ends_must_agree_in_what_their_transport_needs(kind, changes, expected):
    reason = transport.disagreement(kind, SAME, {**SAME, **changes})
    if expected is None:
        assert reason is None
    else:
        assert re.match(f"the trainer has {expected}", reason)


def test_the_trainer_takes_sglangs_settings_of_nccl_unless_it_has_its_own(monkeypatch):
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    transport.settle_nccl()
    told = transport.own_facts()
    assert (told["NCCL_CUMEM_ENABLE"], told["NCCL_NVLS_ENABLE"]) == ("0", "1")
    monkeypatch.delenv("NCCL_CUMEM_ENABLE")


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_an_engine_that_is_lost_in_mid_transfer_is_dropped_and_the_other_served(cast, number):
    trainers = cast.trainers()
    lost, well = cast(Engine, 0), cast(Engine, 0)
    connect(trainers, {"lost": [lost], "well": [well]})
    blobs = send(trainers, 0, 1, LARGE)
    lost.call("fetch", blobs[0][0])  # the first rank's is through, the second's is on its way
    lost.signal(number)
    begun = time.monotonic()
    for blob in blobs:
        well.call("fetch", blob[0])
    failures = together(trainers, "settle")
    assert time.monotonic() - begun < TIMEOUT_S + PATIENCE_S
    assert failures[0] == {} and failures[1].keys() == {"lost"}
    assert "training rank 1 within 3 s" in failures[1]["lost"]

    trainers[0].call("drop", "lost")  # as the lead tells all
    blobs = send(trainers, 1, 1, LARGE)
    for blob in blobs:
        well.call("fetch", blob[0])
    assert together(trainers, "settle")[0] == {}


def test_a_bucket_that_is_still_on_its_way_is_not_overwritten():
    sender = GroupSender(host_store(HOST, 20.0), 0, 1)
    sender._links["a"] = way = Way()
    pieces = []
    for index in range(4):
        blob = sender.put(index, codes(0, index, 1, 0, 640), to=(1, 0))
        pieces.append(blob.pieces)
        sender.deliver(index)
    assert len(way.gone) == 2  # the third bucket has the memory of the first
    for memory, sent in zip(way.gone, pieces, strict=False):
        assert [checksum(piece_of(memory, piece)) for piece in sent] == [p.checksum for p in sent]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_training_rank_that_is_lost_ends_the_wait_of_the_engine(cast, number):
    trainers, engine = cast.trainers(), cast(Engine, 0)
    connect(trainers, {"a": [engine]})
    blobs = send(trainers, 0, 1, LARGE)
    trainers[1].signal(number)
    engine.call("fetch", blobs[0][0])
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=r"training rank 1 did not send 67.1 MB within 3 s"):
        engine.call("fetch", blobs[1][0])
    assert time.monotonic() - begun < TIMEOUT_S + PATIENCE_S


class Store:
    """Has the lines of some, and those who wait for the others wait in vain."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.waited = set(lines), None

    def set(self, key, value):
        self.lines.add(key)

    def delete_key(self, key):
        pass

    def check(self, keys):
        return set(keys) <= self.lines

    def wait(self, keys, timeout):
        self.waited = timeout
        raise RuntimeError("wait timeout")


def test_an_end_waits_no_longer_than_agreed_and_names_who_did_not_come():
    sender = GroupSender(host_store(HOST, 20.0), 0, 2, connect_timeout_s=9.0)
    sender._stores["a"] = store = Store("meeting/0/a/3")
    assert sender.connect({"a": 2}) == {
        "a": "training rank 0 could not reach its 2 ranks within 9 s: training rank 1, engine rank "
        "0 did not come"
    }
    assert store.waited == timedelta(seconds=9)


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_a_mistake_in_sync_host_on_every_rank(host, tmp_path):
    shared = []
    site = Site(
        **{"rank": 0, "size": 2, "leads": True, "device": torch.device("cpu"), "name": ""},
        **{"run_dir": tmp_path, "token": "t", "one_machine": True, "shared": "", "hosts": ()},
        **{"share": lambda said: shared.append(said) or said, "host": host},
        timeout_s=TIMEOUT_S,
    )
    other = replace(site, rank=1, leads=False, share=lambda _: shared[0])
    for rank in (site, other):
        with pytest.raises(ConfigError, match=f"cannot listen at '{host}' .*; set sync.host to"):
            GroupSender.open(rank)


def test_the_store_is_bound_to_the_given_address_alone():
    store = host_store(HOST, 5.0)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", store.port))


class Work:
    def is_completed(self) -> bool:
        return False


class Backend:
    """Records calls; ``broken`` refuses to send, ``stuck`` never comes back from an abort."""

    def __init__(self, *, broken: bool = False, stuck: bool = False) -> None:
        self.calls: list = []
        self.broken, self.stuck = broken, stuck

    def send(self, tensors, rank, tag):
        self.calls.append(("send", rank))
        if self.broken:
            raise RuntimeError("NCCL error: remote process exited")

    def recv(self, tensors, rank, tag):
        self.calls.append(("recv", rank))

    def _start_coalescing(self):
        self.calls.append("start")

    def _end_coalescing(self):
        self.calls.append("end")
        return Work()

    def abort(self):
        self.calls.append("abort")
        if self.stuck:
            threading.Event().wait()


def nccl_link(backend: Backend) -> Link:
    return Link("a/1", backend, torch.device("cuda", 0), 2)


def test_a_group_of_calls_is_closed_where_one_of_them_fails():
    backend = Backend(broken=True)
    with pytest.raises(RuntimeError, match="remote process exited"):
        nccl_link(backend).send([(2, torch.zeros(1)), (3, torch.zeros(1))], 0)
    assert backend.calls == ["start", ("send", 2), "end"]


def test_what_never_comes_is_given_up_at_the_deadline(monkeypatch):
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append)
    monkeypatch.setattr(link, "time", clock)
    with pytest.raises(LinkError, match="timed out"):
        one = nccl_link(Backend())
        one.finish(*one.receive([(0, torch.zeros(1))], 0), 7.0)
    assert sum(waits) == pytest.approx(7.0, abs=0.01)


def test_an_abort_that_does_not_come_back_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(link, "ABORT_S", 0.0)
    backend = Backend(stuck=True)
    nccl_link(backend).abort()
    assert backend.calls == ["abort"]


def test_a_call_without_a_deadline_gets_one_and_is_undone_when_it_comes_back_late():
    released, undone = threading.Event(), threading.Event()
    with pytest.raises(LinkError, match=r"not done within 0.0 s"):
        within(0.0, released.wait, late=undone.set)
    assert not undone.is_set()
    released.set()
    assert undone.wait(PATIENCE_S)
    assert within(PATIENCE_S, lambda: 7, late=undone.set) == 7
    with pytest.raises(KeyError):
        within(PATIENCE_S, lambda: {}["none"], late=undone.set)


@pytest.mark.parametrize("before", [None, "1"])
def test_groups_are_made_without_a_watchdog_and_leave_the_environment_as_it_was(
    before, monkeypatch
):
    monkeypatch.delenv(WATCHDOG, raising=False)
    if before is not None:
        monkeypatch.setenv(WATCHDOG, before)
    with unwatched():
        assert os.environ[WATCHDOG] == "0"
    assert os.environ.get(WATCHDOG) == before


class Fleet:
    """Three engines, the second of which cannot be paused."""

    config = SimpleNamespace(backend="embedded")

    def __init__(self) -> None:
        self.engines = [EngineRecord(name) for name in "abc"]

    @contextlib.contextmanager
    def publication(self):
        yield self.engines

    def each(self, act, purpose, engines):
        return {engine: None for engine in engines if engine.name != "b"}


def test_an_engine_that_fails_before_the_links_are_opened_is_in_no_chain():
    sender = GroupSender(host_store(HOST, 20.0), 0, 1)
    publisher = SimpleNamespace(
        fleet=Fleet(), policy=SimpleNamespace(align=None), sync=None, sender=sender, stage=False
    )
    with contextlib.ExitStack() as publication:
        assert Publisher._begin(publisher, 1, publication, []) == {"a": 1, "c": 1}
        publisher._update.wait()
        assert sender.describe("c", 1)["route"]["from"] == "a"
        publisher._update._started_at = None  # nobody was paused
