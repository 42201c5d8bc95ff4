"""Weights on their way from trainer to engine over NCCL, by the communicators they take."""

import torch
import torch.distributed as dist

from qurl_megatron.tensors.slice import Shard
from qurl_megatron.wire.group import GroupSender, host_store, join_store
from qurl_megatron.wire.message import checksum, piece_of
from qurl_megatron.wire.session import open_receiver
from tests.support.ranks import run_on_ranks

HOST = "127.0.0.1"
TRAINERS = 2


def send_versions(device, port: int) -> None:
    """Ranks 0 and 1 train; the others are an engine."""
    from emulated_cuda.distributed import communicators

    rank = dist.get_rank()
    end = Sends(rank, port, device) if rank < TRAINERS else Receives(rank - TRAINERS)
    made = []
    for version in (1, 2, 3):
        end.meet(version)
        for index in range(3):
            blobs: list = [None] * dist.get_world_size()
            dist.all_gather_object(blobs, end.put(index))
            end.move(index, blobs[:TRAINERS])
        made.append(len(communicators()))
    # At most one to each peer of the other side, and none for the versions after the first.
    assert 0 < made[0] == made[1] == made[2]


class Sends:
    def __init__(self, rank: int, port: int, device) -> None:
        self.rank, self.device = rank, device
        store = join_store(HOST, port, 20.0)
        self.sender = GroupSender(store, rank, TRAINERS, device=device, timeout_s=20.0)

    def meet(self, version: int) -> None:
        self.sender.begin(version)
        dist.broadcast_object_list([self.sender.describe("a", 2)], src=0)
        assert self.sender.connect({"a": 2}) == {}

    def put(self, index: int) -> list:
        value = torch.arange(256, dtype=torch.int32, device=self.device) + 1000 * self.rank + index
        return [
            self.sender.put(index, [Shard.whole("w", value + 100 * r)], to=(2, r)) for r in range(2)
        ]

    def move(self, index: int, blobs: list) -> None:
        self.sender.deliver(index)
        assert self.sender.settle() == {}
        self.sender.finish()


class Receives:
    def __init__(self, rank: int) -> None:
        self.rank, self.receiver = rank, None

    def meet(self, version: int) -> None:
        about: list = [None]
        dist.broadcast_object_list(about, src=0)
        if self.receiver is None:
            self.receiver = open_receiver(about[0], self.rank)
        else:
            assert self.receiver.follow(about[0])

    def put(self, index: int) -> None:
        return None

    def move(self, index: int, blobs: list) -> None:
        for source, theirs in enumerate(blobs):
            blob = theirs[self.rank]
            (piece,) = blob.pieces
            found = piece_of(self.receiver.fetch(blob), piece)
            assert found.is_cuda and checksum(found) == piece.checksum
            first = 1000 * source + index + 100 * self.rank
            assert found.tolist() == list(range(first, first + 256))


def test_communicators_are_made_for_the_first_version_and_kept(nccl, tmp_path):
    store = host_store(HOST, 20.0)
    run_on_ranks(send_versions, TRAINERS + 2, nccl, tmp_path, store.port)
