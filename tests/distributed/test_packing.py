"""How responses share passes, padded or end to end, changes no value and no gradient."""

from dataclasses import replace

import pytest

from qurl_megatron.config import TrainConfig
from tests.support.cases import all_but
from tests.support.policies import ALGO, PACKED, assert_same_training, recipe, run

# Small enough for several passes of several shapes; the layouts are crossed with the families.
DYNAMIC = dict(max_tokens=30)
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
    config = replace(recipe(folder, layout, **ALGO), train=TrainConfig(**train))
    actual = run(tmp_path, backend, config, "split")
    assert_same_training(actual, expected)
    padding = [found["metrics"][0]["train/padding_fraction"] for found in (actual, expected)]
    assert padding[0] < padding[1]
