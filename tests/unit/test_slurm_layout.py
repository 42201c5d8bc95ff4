import pytest

from qurl_megatron.cluster.cluster import NodeConfig
from qurl_megatron.cluster.layout import Allocation, Component, lay_out
from qurl_megatron.config import ParallelConfig, RolloutConfig
from qurl_megatron.kit.errors import ConfigError

NODE = NodeConfig(gpus=8, cpus=96, memory_gib=1600)


def sglang(**values) -> RolloutConfig:
    return RolloutConfig(backend="sglang", **values)


@pytest.mark.parametrize(
    ("parallel", "rollout", "layout"),
    [
        ({"tensor": 2}, RolloutConfig(engines=2), Allocation(Component(1, 2, 2), None)),
        ({"tensor": 8, "data": 2}, RolloutConfig(), Allocation(Component(2, 8, 8), None)),
        (
            {"tensor": 8},
            sglang(engines=4, engine_tensor=2, colocate=True),
            Allocation(Component(1, 8, 8), None),
        ),
        (
            {"tensor": 2},
            sglang(engines=2, engine_tensor=2, engine_first_gpu=2),
            Allocation(Component(1, 2, 6), None),
        ),
        (
            {"tensor": 8, "data": 2},
            sglang(engines=8, engine_tensor=2, rendezvous="engines"),
            Allocation(Component(2, 8, 8), Component(2, 1, 8), engines=4),
        ),
        (
            {"tensor": 2},
            sglang(engines=3, engine_tensor=2, rendezvous="engines"),
            Allocation(Component(1, 2, 2), Component(1, 1, 6), engines=3),
        ),
        ({"tensor": 4}, sglang(urls=("http://a:1",)), Allocation(Component(1, 4, 4), None)),
    ],
    ids=["embedded", "nodes", "colocated", "beside", "apart", "part of a node", "elsewhere"],
)
def test_ranks_and_engines_are_cut_into_nodes(parallel, rollout, layout):
    assert lay_out(ParallelConfig(**parallel), rollout, NODE) == layout


@pytest.mark.parametrize(
    ("parallel", "rollout", "words"),
    [
        ({"tensor": 4, "data": 3}, {}, "12 ranks .*node.gpus=8 .*multiple of 8"),
        ({}, {"engines": 6, "engine_tensor": 2, "rendezvous": "e"}, "engines=6 .*multiple of 4"),
        ({}, {"engine_tensor": 3, "rendezvous": "e"}, "engine_tensor=3 .*node.gpus=8; lower it"),
        ({"tensor": 8}, {"engines": 2, "engine_first_gpu": 8}, "up to 10 .*rollout.rendezvous"),
        ({"tensor": 4}, {"engines": 2}, "engine_first_gpu=0 .*4 training ranks; set it to 4"),
    ],
)
def test_what_does_not_divide_is_one_sentence_with_the_mend(parallel, rollout, words):
    with pytest.raises(ConfigError, match=words):
        lay_out(ParallelConfig(**parallel), sglang(**rollout), NODE)


def test_cpus_and_memory_go_with_the_gpus():
    whole, quarter, none = Component(2, 8, 8), Component(1, 2, 2), Component(1, 1, 0)
    assert [c.cpus_per_task(NODE) for c in (whole, quarter, none)] == [12, 12, 96]
    assert [c.memory_gib(NODE) for c in (whole, quarter, none)] == [1600, 400, 1600]
    assert Allocation(quarter, whole, engines=4).whole == Component(3, 2, 8)  # room for either
