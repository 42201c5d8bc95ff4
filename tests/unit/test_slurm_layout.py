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
    ("parallel", "rollout", "said"),
    [
        ({"tensor": 4, "data": 3}, RolloutConfig(), "12 ranks do not fill nodes of node.gpus=8"),
        (
            {},
            sglang(engines=6, engine_tensor=2, rendezvous="e"),
            "rollout.engines=6 do not fill nodes evenly: 4 of rollout.engine_tensor=2 fit on "
            "node.gpus=8; make them a multiple of 4",
        ),
        (
            {},
            sglang(engine_tensor=3, rendezvous="e"),
            "rollout.engine_tensor=3 does not divide node.gpus=8",
        ),
        (
            {"tensor": 8},
            sglang(engines=2, engine_first_gpu=8),
            "take GPUs up to 10, and the node of the leading rank has node.gpus=8; lower them, or "
            "set rollout.rendezvous",
        ),
        (
            {"tensor": 4},
            sglang(engines=2),
            "rollout.engine_first_gpu=0 puts engines on GPUs of the 4 training ranks; set "
            "rollout.engine_first_gpu=4",
        ),
    ],
)
def test_what_does_not_divide_is_one_sentence_with_the_mend(parallel, rollout, said):
    with pytest.raises(ConfigError) as error:
        lay_out(ParallelConfig(**parallel), rollout, NODE)
    assert said in str(error.value)


def test_cpus_and_memory_go_with_the_gpus():
    whole, quarter, none = Component(2, 8, 8), Component(1, 2, 2), Component(1, 1, 0)
    assert [c.cpus_per_task(NODE) for c in (whole, quarter, none)] == [12, 12, 96]
    assert [c.memory_gib(NODE) for c in (whole, quarter, none)] == [1600, 400, 1600]


def test_one_allocation_that_is_cut_in_two_has_room_for_both():
    layout = Allocation(Component(2, 8, 8), Component(1, 1, 8), engines=4)
    assert layout.whole == Component(3, 8, 8)
