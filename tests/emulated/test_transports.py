"""Weights on their way from trainer to engine over NCCL, by the communicators they take."""

import torch
import torch.distributed as dist

from qurl_megatron.tensors.slice import Shard
from qurl_megatron.wire.group import GroupSender
from qurl_megatron.wire.message import piece_of
from qurl_megatron.wire.session import open_receiver
from qurl_megatron.wire.store import host_store, join_store
from tests.support.ranks import run_on_ranks

HOST = "127.0.0.1"
TRAINERS = ENGINE_RANKS = 2


def send_versions(device, port: int) -> None:
    """Ranks 0 and 1 train; the others are an engine."""
    from emulated_cuda.distributed import communicators

    rank, made, receiver = dist.get_rank(), [], None
    trains = rank < TRAINERS
    if trains:
        store = join_store(HOST, port, 20.0)
        sender = GroupSender(store, rank, TRAINERS, device=device, timeout_s=20.0)
    for version in (1, 2, 3):
        if trains:
            sender.begin(version)
        about = [sender.describe("a", ENGINE_RANKS) if trains else None]
        dist.broadcast_object_list(about, src=0)
        if trains:
            assert sender.connect({"a": ENGINE_RANKS}) == {}
        elif receiver is None:
            receiver = open_receiver(about[0], rank - TRAINERS)
        else:
            assert receiver.follow(about[0])
        sent = []
        for to in range(ENGINE_RANKS if trains else 0):
            weight = torch.full((256,), 10.0 * rank + to, device=device)
            sent.append(sender.put(0, [Shard.whole("w", weight)], to=(ENGINE_RANKS, to)))
        blobs: list = [None] * dist.get_world_size()
        dist.all_gather_object(blobs, sent)
        if trains:
            sender.deliver(0)
            assert sender.settle() == {}
            sender.finish()
        else:
            for source in range(TRAINERS):
                blob = blobs[source][rank - TRAINERS]
                weight = piece_of(receiver.fetch(blob), blob.pieces[0])
                assert weight.is_cuda and (weight == 10 * source + rank - TRAINERS).all()
        made.append(len(communicators()))
    # At most one to each peer of the other side, and none for the versions after the first.
    assert 0 < made[0] == made[1] == made[2]


def test_communicators_are_made_for_the_first_version_and_kept(nccl, tmp_path):
    store = host_store(HOST, 20.0)
    run_on_ranks(send_versions, TRAINERS + ENGINE_RANKS, nccl, tmp_path, store.port)


def send_along_a_chain(device, port: int) -> None:
    """Rank 0 trains, 1 is an engine, and 2 the one behind it."""
    from emulated_cuda.distributed import communicators

    rank, made, receiver = dist.get_rank(), [], None
    engines = {"a": 1, "b": 1}
    if rank == 0:
        sender = GroupSender(join_store(HOST, port, 20.0), 0, 1, device=device, timeout_s=20.0)
    for version in (1, 2, 3):
        about: list = [None]
        if rank == 0:
            sender.begin(version)
            sender.arrange(engines)
            about = [[sender.describe(name, 1) for name in engines]]
        dist.broadcast_object_list(about, src=0)
        if rank == 0:
            assert sender.connect(engines) == {}
        elif receiver is None:
            receiver = open_receiver(about[0][rank - 1], 0)
        else:
            assert receiver.follow(about[0][rank - 1])
        for index in range(4):
            sent: list = [None]
            if rank == 0:
                weight = torch.full((1024,), 10.0 * version + index, device=device)
                sent = [sender.put(index, [Shard.whole("w", weight)], to=(1, 0))]
            dist.broadcast_object_list(sent, src=0)
            if rank == 0:
                sender.deliver(index)
            else:
                weight = piece_of(receiver.fetch(sent[0]), sent[0].pieces[0])
                assert weight.is_cuda and (weight == 10 * version + index).all()
            dist.barrier()
        if rank == 0:
            assert sender.settle() == {}
            sender.finish()
        made.append(len(communicators()))
    assert 0 < made[0] == made[1] == made[2]


def test_an_engine_passes_on_what_it_gets_and_links_are_kept(nccl, tmp_path):
    store = host_store(HOST, 20.0)
    run_on_ranks(send_along_a_chain, 3, nccl, tmp_path, store.port)
