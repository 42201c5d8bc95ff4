"""A version that training ranks of several machines relay is whole on each of them."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.config import QuantConfig, SyncConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.publish import publisher
from qurl_megatron.wire.link import LinkError
from qurl_megatron.wire.message import checksum, piece_of
from qurl_megatron.wire.relay import RelaySender, layout, peers
from qurl_megatron.wire.transport import Site
from tests.support.models import tiny_checkpoint
from tests.support.policies import build, recipe
from tests.support.published import assert_published, assert_whole, publisher_of
from tests.support.publishing import KeepsVersions
from tests.support.ranks import run_on_ranks
from tests.support.versions import joined
from tests.support.waiting import wait_until


def site_of(ranks, hosts, out: Path, timeout_s: float = 60.0) -> Site:
    """A training rank's facts, as if it was on the machine ``hosts[ranks.rank]``."""

    def share(value):
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    token = "-".join(out.parts[-3:])  # of no other process that tests
    places = {"run_dir": out, "shared": "", "host": "127.0.0.1", "name": "", "token": token}
    size, device = ranks.world_size, ranks.device
    own = {"rank": ranks.rank, "size": size, "leads": ranks.leads, "device": device}
    return Site(**places, **own, one_machine=False, hosts=hosts, share=share, timeout_s=timeout_s)


class Keeps(RelaySender):
    """Notes the pieces that come into this rank's memory, its own and its peers'."""

    def begin(self, version):
        self.came = []

    def put_everywhere(self, index, parts):
        blobs = super().put_everywhere(index, parts)
        memory, own = self.room(index), self._hosts[self._machine]
        for peer in self._gather(blobs):
            blob = peer[own]
            start = blob.where["start"]
            for piece in blob.pieces:
                value = piece_of(memory[start : start + blob.bytes], piece).clone()
                assert checksum(value) == piece.checksum, f"{piece.name} is damaged"
                self.came.append((piece, value))
        return blobs


def relay(device, config, hosts, scheme, out):
    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks, uaq_scale=1.5)
        quant = QuantConfig(scheme=scheme, uaq_scale=1.5)
        sender = Keeps.open(site_of(ranks, hosts, out))
        with publisher_of(policy, config, quant, out, sender=sender) as publishing:
            if ranks.leads:
                publishing.fleet = KeepsVersions(out, list(dict.fromkeys(hosts)))
            for version in (0, 1):  # memory grows with the first
                publishing.publish(version)
        torch.save(sender.came, out / f"came-{ranks.rank}.pt")


LAYOUTS = [
    ("a a b b", dict(tensor=2, pipeline=2)),
    ("a b a b", dict(tensor=2, data=2)),
    ("a b c", dict(pipeline=3)),
    ("a a", dict(tensor=2)),
]


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", ["int8", "none"])
@pytest.mark.parametrize(("hosts", "parallel"), LAYOUTS)
def test_each_machine_gets_the_whole_version_once(hosts, parallel, scheme, backend, tmp_path):
    hosts = hosts.split()
    folder = tiny_checkpoint(tmp_path / "model", "qwen2", vocab_size=131, num_hidden_layers=6)
    config = recipe(folder, parallel, dtype="bfloat16")
    run_on_ranks(relay, len(hosts), backend, tmp_path, config, hosts, scheme, tmp_path)

    if backend == "gloo":  # what engines took in
        assert_published(tmp_path / "1.pt", folder, scheme)
    for machine in dict.fromkeys(hosts):
        pieces: list = []
        for rank, host in enumerate(hosts):
            if host == machine:
                file = tmp_path / f"came-{rank}.pt"
                pieces += torch.load(file, weights_only=False, map_location="cpu")
        assert_whole(joined(pieces), folder, scheme)  # joined only if each part came once


def miss_one(device, config, out, broken):
    """One rank's weights cannot be quantized, or find no room; the next version is whole."""
    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks, uaq_scale=1.5)
        sender = RelaySender.open(site_of(ranks, ["a", "b"], out))
        quant = QuantConfig(scheme="int8", uaq_scale=1.5)
        with publisher_of(policy, config, quant, out, sender=sender) as publishing:
            if ranks.leads:
                publishing.fleet = KeepsVersions(out, ["a", "b"])
            make, slots = publishing._shards.quantized, sender._slots

            def refuse(*args):
                if args:
                    make(*args)  # the other rank counts on this one there
                raise ConfigError("refused")

            if ranks.rank == 1 and broken == "weight":
                publishing._shards.quantized = refuse
            if ranks.rank == 1 and broken == "room":
                sender._slots = [SimpleNamespace(memory=None, of=lambda _: refuse())] * 2
            with pytest.raises(ConfigError, match="^refused$"):
                publishing.publish(0)
            publishing._shards.quantized, sender._slots = make, slots
            publishing.publish(1)


@pytest.mark.parametrize("broken", ["weight", "room"])
def test_a_rank_that_cannot_make_its_part_says_so_on_all_of_them(broken, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "qwen2", vocab_size=131)
    config = recipe(folder, dict(data=2), dtype="bfloat16")
    run_on_ranks(miss_one, 2, "gloo", tmp_path, config, tmp_path, broken)
    assert_published(tmp_path / "1.pt", folder, "int8")


def lose_one(device, config, out, answers):
    """One rank is killed, or stops, with parts of its third version given."""
    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks, uaq_scale=1.5)
        sender = RelaySender.open(site_of(ranks, ["a", "b"], out, 60.0 if answers else 8.0))
        quant = QuantConfig(scheme="int8", uaq_scale=1.5)
        with publisher_of(policy, config, quant, out, sender=sender) as publishing:
            failed, over = [], out / "over"
            if ranks.leads:
                publishing.fleet = KeepsVersions(out, ["a", "b"])
                publishing.fleet.serve(failed.append)
            publishing.publish(0)
            publishing.publish(1)
            if not ranks.leads:
                buckets, exchange = iter(range(3)), sender._exchange

                def leave(*args):
                    if next(buckets) < 2:
                        return exchange(*args)
                    wait_until(lambda: answers or over.exists())
                    os._exit(0)

                sender._exchange = leave
            with pytest.raises(LinkError, match="^a training rank on b is gone, or gave no part"):
                publishing.publish(2)
            over.touch()
            assert [text.partition(":")[0] for text in failed] == ["version 2 was given up"] * 2


@pytest.mark.parametrize("answers", [True, False], ids=["killed", "stopped"])
def test_a_peer_that_is_lost_ends_a_version_that_no_engine_serves(answers, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "qwen2", vocab_size=131)
    config = recipe(folder, dict(tensor=2), dtype="bfloat16")
    run_on_ranks(lose_one, 2, "gloo", tmp_path, config, tmp_path, answers)
    assert_published(tmp_path / "1.pt", folder, "int8")
    assert not (tmp_path / "2.pt").exists()


def test_peers_are_the_ranks_of_one_place_and_a_slot_begins_with_its_own_part():
    assert peers(["a", "a", "b", "b"]) == [[0, 2], [1, 3]]
    assert peers(["a", "b", "a", "b"]) == [[0, 1], [2, 3]]
    assert layout([65, 0, 64], 0) == ([0, 128, 128], 192)
    assert layout([65, 0, 64], 2) == ([64, 192, 0], 192)
    with pytest.raises(ConfigError, match="a has 2, b has 1; set sync.transport=files"):
        peers(["a", "b", "a"])


def choose(device, config, hosts, out):
    with megatron_runtime(config.parallel) as ranks:
        publisher.address_for_others = lambda one_node: hosts[ranks.rank]
        policy, sync = build(config, ranks), SyncConfig(host="127.0.0.1")
        sender = publisher.make_sender(sync, config.rollout, policy, out / "run")
        assert sender.kind == ("files" if hosts.count("a") > 1 else "relay")
        dist.barrier()
        sender.close()


@pytest.mark.parametrize("hosts", [["a", "b", "c"], ["a", "a", "b"]])
def test_machines_with_different_numbers_of_ranks_are_sent_files(hosts, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "qwen2", num_hidden_layers=3)
    config = recipe(folder, dict(pipeline=3))
    rollout = replace(config.rollout, each_node=True, rendezvous=str(tmp_path))
    run_on_ranks(choose, 3, "gloo", tmp_path, replace(config, rollout=rollout), hosts, tmp_path)
