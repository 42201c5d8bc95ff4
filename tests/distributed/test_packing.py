"""How responses share passes, padded or end to end, changes no value and no gradient."""

from dataclasses import replace

import pytest

from qurl_megatron.config import TrainConfig
from qurl_megatron.data.responses import Responses
from tests.cases import all_but
from tests.distributed.test_policy import ALGO, assert_same_training, recipe, run
from tests.support.models import random_samples

# Small enough for several passes of several shapes; the layouts are crossed with the families.
DYNAMIC, PACKED = dict(max_tokens=30), dict(max_tokens=48, packed=True)
CASES = {
    "dynamic": ("qwen2", {}, DYNAMIC),
    "dynamic, TP2 x PP2": ("qwen3", dict(tensor=2, pipeline=2), DYNAMIC),
    "dynamic, DP2": ("qwen2", dict(data=2), DYNAMIC),
    "packed": ("qwen2", {}, PACKED),
    "packed, TP2 x PP2": ("llama", dict(tensor=2, pipeline=2), PACKED),
    "packed, CP2": ("qwen2", dict(context=2), PACKED),
    "packed, TP2 x CP2": ("qwen3", dict(tensor=2, context=2), PACKED),
    "packed experts, PP2": ("qwen3_moe", dict(pipeline=2), PACKED),
}


@pytest.mark.parametrize(
    "case",
    all_but(
        CASES,
        "dynamic",
        "packed, CP2",
        nccl=["dynamic, DP2", "packed, TP2 x CP2", "packed experts, PP2"],
    ),
)
def test_a_token_budget_trains_as_fixed_microbatches_do(backend, case, alone, tmp_path):
    family, layout, train = CASES[case]
    folder, expected = alone(family, **ALGO)
    config = replace(recipe(folder, layout, **ALGO), train=TrainConfig(share_prefix=False, **train))
    actual = run(tmp_path, backend, config, "split")
    assert_same_training(actual, expected)
    padding = [found["metrics"][0]["train/padding_fraction"] for found in (actual, expected)]
    assert padding[0] < padding[1]


LENGTHS = Responses.of(random_samples(16)).summary.totals


def test_data_ranks_of_that_budget_have_different_numbers_of_passes():
    from qurl_megatron.training.step import deal

    dealt = deal(LENGTHS, 2, 2, 1, seed=1, budget=DYNAMIC["max_tokens"])
    assert [[len(passes) for passes in update] for update in dealt] == [[3, 2], [3, 2]]


@pytest.mark.parametrize("budget, packed", [(0, False), (30, False), (48, True)])
def test_minibatches_have_the_same_responses_in_every_layout(budget, packed):
    from qurl_megatron.training.step import deal

    alone = deal(LENGTHS, 2, 1, 2, seed=1)
    for data_size in (1, 2, 4):
        dealt = deal(LENGTHS, 2, data_size, 2, seed=1, budget=budget, packed=packed)
        for update, expected in zip(dealt, alone, strict=True):
            found = [i for rank in update for passes in rank for i in passes]
            assert sorted(found) == sorted(i for passes in expected[0] for i in passes)


def test_data_ranks_get_like_loads_and_as_many_responses():
    from qurl_megatron.training.step import deal

    lengths = [1, 2, 3, 4, 50, 60, 70, 100]
    (update,) = deal(lengths, 1, 2, 1, seed=3, budget=1000)
    loads = [sorted(lengths[i] for passes in rank for i in passes) for rank in update]
    # From the longest down, in turns: 100 | 70, 60 | 50, 4 | 3, 2 | 1.
    assert sorted(loads) == [[1, 4, 50, 100], [2, 3, 60, 70]]
