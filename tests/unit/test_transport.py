"""Files and memory: what one process puts another fetches, and every mishap has a name."""

import contextlib
import dataclasses
import os
from pathlib import Path

import msgspec
import pytest
import torch

from qurl_megatron.kit import undertaker
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.wire import transport
from qurl_megatron.wire.files import FilesSender
from qurl_megatron.wire.message import Receipt, Room, checksum, piece_of, word_sum
from qurl_megatron.wire.session import open_receiver
from qurl_megatron.wire.shared_memory import MemorySender
from tests.support.disks import fill, small_disk
from tests.support.remote import Remote
from tests.support.shards import shard
from tests.support.waiting import wait_until

SHM = Path("/dev/shm")


def parts(seed: int, rows: int = 6) -> list:
    """Formats of 2, 1, 1, 4 and 2 bytes; a column slice is not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randint(-127, 128, (rows, 10), dtype=torch.int8, generator=generator)
    return [
        shard("norm", torch.randn(7, generator=generator).bfloat16()),
        shard("columns", wide[:, 3:8], 1, 3),
        shard("rows", wide[2:], 0, 12),
        shard("scale", torch.rand(rows, 1, generator=generator), 0, 12),
        shard("fp8", torch.randn(3, 5, generator=generator).to(torch.float8_e4m3fn), 0),
        shard("odd", torch.randn(3, generator=generator).bfloat16()),
    ]


@pytest.fixture(params=["files", "memory"])
def sender(request, tmp_path):
    made = make_sender(request.param, tmp_path)
    yield made
    made.close()


def make_sender(kind: str, root: Path):
    if kind == "files":
        made = FilesSender(root / "versions", "pp0-tp0", leads=True)
    else:
        made = MemorySender("test", 0, leads=True, root=root)
    made.receipt_wait_s = 0.2
    return made


def check(memory: torch.Tensor, blob, sent: list) -> None:
    assert memory.dtype is torch.uint8 and len(memory) == blob.bytes
    by_name = {part.name: part for part in sent}
    assert {piece.name for piece in blob.pieces} == by_name.keys()
    for piece in blob.pieces:
        part = by_name[piece.name]
        assert (piece.dim, piece.start) == (part.dim, part.start)
        found = piece_of(memory, piece)
        assert found.dtype == part.value.dtype
        assert torch.equal(found.view(torch.uint8), part.value.contiguous().view(torch.uint8))
        assert checksum(found) == piece.checksum


@pytest.mark.parametrize("kept", [(0, 2, 3), (1, 3, 5)])
def test_a_room_that_is_too_small_or_holds_more_than_is_sent_changes_nothing(kept, tmp_path):
    sender, drawn = make_sender("memory", tmp_path), parts(0)
    sender.put(0, drawn[:3])
    room = Room(sender.room(0))
    made = []
    for part in drawn:
        place = room.place(part.value.shape, part.value.dtype)
        value = part.value if place is None else place.copy_(part.value)
        made.append(dataclasses.replace(part, value=value))
    assert room.place((1 << 20,), torch.int8) is None
    # More than the room holds goes with them, so that the memory grows.
    more = shard("more", torch.arange(1 << 20))
    sent = [*(made[i] for i in kept), more]
    blob = sender.put(0, sent)
    receiver = open_receiver(sender.describe("http://a:1", 1), 0)
    check(receiver.fetch(blob), blob, [*(drawn[i] for i in kept), more])
    receiver.close()
    sender.close()


def test_what_is_put_is_fetched(sender):
    sender.begin(1)
    receiver, before = open_receiver(sender.describe("a", 1), 0), None
    for index, rows in enumerate([6, 3, 40, 5, 4000, 5]):  # slots grow and are used again
        sent = sender.put(index, parts(index, rows)), parts(index, rows)
        check(receiver.fetch(sent[0]), *sent)
        if before:  # the bucket before is whole while the next is put
            check(receiver.fetch(before[0]), *before)
        before = sent
    receiver.close()


class Engine:
    def __init__(self, way, rank):
        self.receiver, self.rank = open_receiver(way, rank), rank

    def sums(self, blob):
        memory = self.receiver.fetch(blob)
        return [checksum(piece_of(memory, piece)) for piece in blob.pieces]

    def report(self, session):
        self.receiver.report(Receipt(session, self.rank, None, 3, 0.1))


@pytest.mark.parametrize("kind", ["files", "memory"])
def test_other_processes_see_the_bytes_and_leave_receipts(kind, tmp_path):
    sender = make_sender(kind, tmp_path)
    engines = [Remote(Engine, sender.describe("a", 1), rank) for rank in range(2)]
    try:
        sender.begin(1)
        for index in range(5):
            blob = sender.put(index, parts(index, rows=100 * (index + 1)))
            for engine in engines:
                assert engine.call("sums", blob) == [piece.checksum for piece in blob.pieces]
        for engine in engines:
            engine.call("report", "v1-a")
        receipts = sender.receipts("v1-a", 2)
        assert [(r.rank, r.error) for r in receipts] == [(0, None), (1, None)]
        assert "rank 0 left no receipt" in sender.receipts("v1-a", 2)[0].error  # taken
    finally:
        for engine in engines:
            engine.end()
        sender.close()


@pytest.mark.parametrize("kind", ["files", "memory"])
def test_what_a_sender_has_removed_is_no_business_of_the_undertakers(kind, tmp_path):
    sender = make_sender(kind, tmp_path)
    folder = str(sender.folder)

    def is_held() -> bool:
        for descriptor in Path(f"/proc/{undertaker._own._process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the listing's own, closed by now
                if os.readlink(descriptor).startswith(folder):
                    return True
        return False

    wait_until(is_held)
    sender.close()
    wait_until(lambda: not is_held())


class Clock:
    """The outside's: it jumps where somebody sleeps, and ``then`` happens meanwhile."""

    def __init__(self, monkeypatch, then=lambda: None) -> None:
        self.now, self.then = 0.0, then
        monkeypatch.setattr(transport, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.then()


def test_a_receipt_that_comes_late_is_waited_for_and_one_that_is_missing_is_an_error(
    sender, monkeypatch
):
    receiver = open_receiver(sender.describe("a", 1), 1)
    Clock(monkeypatch, lambda: receiver.report(Receipt("v2", 1, "boom", 0, 0.0)))
    lost, there = sender.receipts("v2", 2)
    assert "rank 0 left no receipt" in lost.error and there.error == "boom"


@pytest.mark.parametrize("kind", ["files", "memory"])
def test_where_an_engine_had_no_room_for_its_receipt_the_sender_says_so_at_once(kind, tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        sender = make_sender(kind, disk)
        receiver = open_receiver(sender.describe("a", 1), 0)
        fill(disk)
        with pytest.raises(ConfigError, match="cannot be written"):
            receiver.report(Receipt("v2", 0, None, 1, 0.0))
        with pytest.raises(ConfigError, match=r"v2-0.json cannot be written .* free; .*sync\.dir"):
            sender.receipts("v2", 1)
        (disk / "filler").unlink()
        sender.close()


class Nfs:
    """What a client of a network filesystem remembers: listings, and the absence of names, until
    their folder is opened again, and synchronised."""

    def __init__(self, monkeypatch):
        self._absent: set[str] = set()
        self._read, self._fsync = Path.read_bytes, os.fsync
        monkeypatch.setattr(os, "listdir", lambda folder=".": [])
        monkeypatch.setattr(Path, "iterdir", lambda folder: iter(()))
        monkeypatch.setattr(Path, "read_bytes", lambda path: self.read_bytes(path))
        monkeypatch.setattr(os, "fsync", self.fsync)

    def read_bytes(self, path):
        if str(path) in self._absent:
            raise FileNotFoundError(2, "remembered as absent", str(path))
        try:
            return self._read(path)
        except FileNotFoundError:
            self._absent.add(str(path))
            raise

    def fsync(self, file):
        self._fsync(file)
        self._absent.clear()


def test_a_receipt_is_found_where_listings_and_absences_are_remembered(tmp_path, monkeypatch):
    sender = make_sender("files", tmp_path)
    receiver = open_receiver(sender.describe("a", 1), 0)
    Nfs(monkeypatch)
    left = []

    def late():
        if not left:
            left.append(receiver.report(Receipt("v2", 0, None, 1, 0.0)))

    Clock(monkeypatch, late)
    (receipt,) = sender.receipts("v2", 1)
    assert left and receipt.error is None


def test_an_unknown_transport_is_refused():
    with pytest.raises(ConfigError, match="carrier pigeon"):
        open_receiver({"kind": "carrier pigeon"}, 0)
    with pytest.raises(ConfigError, match="malformed.*receipts"):
        open_receiver({"kind": "files"}, 0)


def test_files_of_a_version_go_when_it_is_finished_or_the_next_begins(tmp_path):
    sender, other = (FilesSender(tmp_path, f"tp{rank}", leads=rank == 0) for rank in range(2))
    kept = other.put(0, parts(0))
    for version in (8, 9):
        sender.begin(version)
        blob = sender.put(3, parts(version))
    assert blob.where == {"path": str(tmp_path / "v000009-tp0-b00003")}
    assert not list(tmp_path.glob("v000008*"))
    sender.finish()
    assert [str(path) for path in tmp_path.glob("v*")] == [kept.where["path"]]
    sender.close()
    assert not tmp_path.exists()


def test_a_full_disk_is_told_with_what_is_needed_and_leaves_no_half_a_file(tmp_path):
    sender = make_sender("files", tmp_path)
    sender.begin(1)
    half = sender.folder / "v000001-pp0-tp0-b00000.tmp"
    half.symlink_to("/dev/full")  # the one place that is always full
    with pytest.raises(ConfigError, match=r"b00000 cannot.*No space.*MB are free.*sync.dir"):
        sender.put(0, parts(0))
    assert not list(sender.folder.glob("v*"))
    sender.put(0, parts(0))  # there is room again


def test_a_folder_without_the_right_to_write_is_told():
    with pytest.raises(ConfigError, match=r"/sys/qurl.*sync.dir"):
        FilesSender(Path("/sys/qurl"), "pp0-tp0", leads=True)


def test_a_file_that_is_gone_or_cut_off_is_named(tmp_path):
    sender = make_sender("files", tmp_path)
    sender.begin(1)
    blob = sender.put(0, parts(0))
    receiver = open_receiver(sender.describe("a", 1), 0)
    path = Path(blob.where["path"])
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ConfigError, match=r"b00000 has \d+ bytes instead of"):
        receiver.fetch(blob)
    path.unlink()
    with pytest.raises(ConfigError, match=r"b00000 cannot be read.*share"):
        receiver.fetch(blob)


def test_two_buckets_of_memory_are_all_there_ever_is(tmp_path):
    sender = make_sender("memory", tmp_path)
    for index in range(7):
        sender.put(index, parts(index, rows=1000))
    slots = [path for path in sender.folder.iterdir() if path.is_file()]
    assert len(slots) == 2
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in slots)
    assert sender.folder.stat().st_mode & 0o777 == 0o700
    assert sum(path.stat().st_size for path in slots) < 2.1 * sender.put(0, parts(0, 1000)).bytes
    sender.close()
    assert not sender.folder.exists()


def test_a_receiver_follows_a_trainer_that_was_started_anew_under_the_same_name(tmp_path):
    killed = make_sender("memory", tmp_path)  # never closed
    receiver = open_receiver(killed.describe("a", 1), 0)
    receiver.fetch(killed.put(0, parts(0)))
    second = make_sender("memory", tmp_path)
    blob = second.put(0, parts(1))
    check(receiver.fetch(blob), blob, parts(1))


def test_a_slot_that_is_not_what_the_trainer_made_is_refused(tmp_path):
    sender = make_sender("memory", tmp_path)
    receiver = open_receiver(sender.describe("a", 1), 0)
    blob = sender.put(0, parts(0))
    path = Path(blob.where["slot"])

    with pytest.raises(ConfigError, match="blob says"):
        receiver.fetch(msgspec.structs.replace(blob, bytes=blob.bytes + 1000))
    receiver.close()
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes())
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be opened.*sync.transport"):
        receiver.fetch(blob)
    path.symlink_to(other)
    with pytest.raises(ConfigError, match="cannot be opened"):
        receiver.fetch(blob)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="is not what this user's trainer makes"):
        receiver.fetch(blob)
    path.unlink()
    path.write_bytes(other.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="another trainer"):
        receiver.fetch(blob)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_another_users_slot_or_folder_is_refused(tmp_path):
    sender = make_sender("memory", tmp_path)
    blob = sender.put(0, parts(0))
    os.chown(blob.where["slot"], 12345, 12345)
    with pytest.raises(ConfigError, match="is not what this user's trainer makes"):
        open_receiver(sender.describe("a", 1), 0).fetch(blob)
    os.chown(sender.folder, 12345, 12345)
    with pytest.raises(ConfigError, match="is not what this user's trainer makes"):
        make_sender("memory", tmp_path)


@pytest.mark.skipif(not SHM.is_dir(), reason="needs /dev/shm")
def test_too_little_memory_is_told_before_a_byte_is_written():
    sender = MemorySender(f"test-{os.getpid()}", 0, leads=True, root=SHM)
    try:
        huge = torch.zeros(1, dtype=torch.int8).expand(1 << 48)
        with pytest.raises(ConfigError, match=r"rank0-0.*No space.*MB are needed.*MB are free"):
            sender.put(0, [shard("w", huge)])
        sender.put(0, parts(0))
    finally:
        sender.close()


def test_expandable_segments_cannot_be_shared_and_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigError, match="with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"):
        MemorySender("test", 0, leads=True, device="cuda", root=tmp_path)
    MemorySender("test", 0, leads=True, root=tmp_path).close()


def test_memory_of_another_version_of_the_package_is_refused(tmp_path, monkeypatch):
    sender = MemorySender("test", 0, leads=True, root=tmp_path)
    told = sender.describe("a", 1)
    sender.close()
    monkeypatch.setattr(transport, "FORMAT", "qurl-update-0")
    with pytest.raises(ConfigError, match="the engine protocol qurl-update-0 .*; install the same"):
        open_receiver(told, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_bucket_is_opened_by_its_handle(tmp_path):
    sender = MemorySender("test", 0, leads=True, device="cuda", root=tmp_path)
    engine = Remote(Engine, sender.describe("a", 1), 0)
    try:
        for index in range(4):
            on_gpu = [dataclasses.replace(p, value=p.value.cuda()) for p in parts(index, 1000)]
            blob = sender.put(index, on_gpu)
            assert engine.call("sums", blob) == [piece.checksum for piece in blob.pieces]
    finally:
        engine.end()
        sender.close()


def test_the_sum_of_words_shows_any_changed_byte_and_any_exchanged_words():
    data = torch.randint(0, 256, (1003,), dtype=torch.uint8)
    whole = word_sum(data)
    for place in range(len(data)):
        damaged = data.clone()
        damaged[place] ^= 128
        assert word_sum(damaged) != whole
    twice = data.clone()
    twice[7] ^= 128
    twice[15] ^= 128
    assert word_sum(twice) != whole
    exchanged = data.clone()
    exchanged[0:8], exchanged[80:88] = data[80:88], data[0:8]
    assert word_sum(exchanged) != whole
    assert word_sum(torch.cat([data.new_zeros(3), data])[3:]) == whole  # wherever it lies
