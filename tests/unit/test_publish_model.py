"""What publishing a version costs, by the planner's model."""

import dataclasses

import pytest
import torch

from qurl_megatron.bench.random_model import config_of
from qurl_megatron.planning.publish_model import PublishSetting, Rates, predict, tensors, volumes
from qurl_megatron.publish.routes import Layout, transfers
from qurl_megatron.tensors.arch import Arch, read_arch

GPUS = Rates.of_gpus(hbm=3000, link=50, disk=10)
WAYS = ("memory", "files", "group", "gathered")


def arch_of(model: str) -> Arch:
    return read_arch(config_of(model))


def setting(scheme="int8", **changes) -> PublishSetting:
    defaults = dict(trainer=Layout(tensor=8), engines=4, engine_tp=2)
    return PublishSetting(arch=arch_of("32B"), scheme=scheme, **{**defaults, **changes})


def test_bytes_are_those_of_the_tensors_that_a_version_holds():
    names = tensors(arch_of("0.5B"), "int8")
    # What two training ranks really sent, in the benchmark.
    assert sum(torch.Size(shape).numel() * size for shape, size in names.values()) == 631455488


def test_quantized_versions_of_32b_have_half_the_bytes_and_ranks_share_them():
    int8, bf16 = predict(setting(), "memory", GPUS), predict(setting("none"), "memory", GPUS)
    assert int8.bytes / bf16.bytes == pytest.approx(0.52, abs=0.01)
    assert int8.bytes / int8.bytes_per_rank == pytest.approx(8, rel=0.01)
    halves = predict(setting(trainer=Layout(tensor=4, pipeline=2)), "memory", GPUS)
    assert halves.bytes == int8.bytes


@pytest.mark.parametrize(("tensor", "pipeline", "engine_tp"), [(1, 1, 1), (2, 4, 2), (2, 3, 1)])
def test_volumes_from_two_layers_are_those_of_the_whole_plan(tensor, pipeline, engine_tp):
    arch = arch_of("0.5B")
    trainer = Layout(tensor=tensor, pipeline=pipeline)
    sent, received = {}, {}
    for part in transfers(tensors(arch, "int8"), arch, trainer, engine_tp):
        sent[part.source] = sent.get(part.source, 0) + part.bytes
        received[part.engine_rank] = received.get(part.engine_rank, 0) + part.bytes
    found = volumes(arch, "int8", tensor, pipeline, engine_tp)
    assert (found.sent, found.received) == (max(sent.values()), max(received.values()))
    assert found.whole == sum(
        torch.Size(shape).numel() * size for shape, size in tensors(arch, "int8").values()
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_faster_link_or_disk_never_takes_longer(way):
    slow = predict(setting(), way, GPUS)
    for field in ("link", "disk", "copy", "hash", "quantize"):
        faster = dataclasses.replace(GPUS, **{field: 2 * getattr(GPUS, field)})
        assert predict(setting(), way, faster).seconds <= slow.seconds


@pytest.mark.parametrize("way", ["memory", "files", "group"])
def test_phases_overlap_but_none_gets_shorter(way):
    cost = predict(setting(bucket_mb=16), way, dataclasses.replace(GPUS, call_s=0.0))
    phases = (cost.quantize_s + cost.put_s, cost.load_s)
    assert max(phases) <= cost.seconds < sum(phases)


def test_on_few_cores_all_work_takes_its_turn():
    alone = dataclasses.replace(GPUS, call_s=0.0)
    cost = predict(setting(), "group", dataclasses.replace(alone, cores=10_000))
    crowded = predict(setting(), "group", dataclasses.replace(alone, cores=1))
    work = 8 * (cost.quantize_s + cost.put_s) + 4 * 2 * cost.load_s
    assert crowded.seconds == pytest.approx(work) and work > cost.seconds
