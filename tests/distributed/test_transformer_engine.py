"""With Transformer Engine's layers, models compute, store and publish what the local ones do.

The library itself needs CUDA; a stand-in with its names, parameters and collectives takes its place
(``tests/support/transformer_engine``). ``alone`` is the local spec on one rank.
"""

from dataclasses import replace

import pytest
import torch

from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.config import ModelConfig, ParallelConfig, TrainConfig
from qurl_megatron.tensors.arch import read_arch, read_config
from tests.support import critics
from tests.support.cases import all_but
from tests.support.logits import assert_logits
from tests.support.models import tiny_checkpoint
from tests.support.policies import (
    ALGO,
    EXPERT_LAYOUTS,
    LAYOUTS,
    PACKED,
    ROUNDING,
    assert_goes_on,
    assert_same_training,
    recipe,
    run,
)
from tests.support.published import assert_published, publish
from tests.support.ranks import run_on_ranks, run_with_stand_in


def check_options(device, folder) -> None:
    from qurl_megatron.actor.build import build_model, transformer_config
    from tests.support.transformer_engine.layers import LayerNormLinear

    parallel = ParallelConfig()
    with megatron_runtime(parallel) as ranks:
        arch = read_arch(read_config(folder))
        config = transformer_config(arch, ModelConfig(path=str(folder)), parallel)
        model = build_model(arch, config, ranks)
        assert config.apply_rope_fusion
        fused = [module for module in model.modules() if isinstance(module, LayerNormLinear)]
        assert fused and all(module.fuse_wgrad_accumulation for module in fused)


@pytest.mark.thorough("nccl")
def test_rotary_embeddings_and_sums_of_weight_gradients_are_fused(backend, qwen2, tmp_path):
    run_with_stand_in(check_options, 1, backend, tmp_path, qwen2)


@pytest.mark.thorough("nccl")
def test_folding_uaq_leaves_the_function_as_it_was(backend, qwen2, tmp_path):
    assert_logits(qwen2, dict(tensor=2), backend, tmp_path, uaq_scale=1.5, run=run_with_stand_in)


def train(backend, tmp_path, config) -> dict:
    return run(tmp_path, backend, config, "te", runner=run_with_stand_in)


@pytest.mark.parametrize(
    "layout", all_but(["TP2", "PP2", "DP2", "CP2", "TP2 x CP2"], "PP2", "DP2", "CP2")
)
def test_gradients_and_updates_equal_the_local_spec(layout, alone, backend, tmp_path):
    folder, expected = alone("qwen2", **ALGO)
    assert_same_training(
        train(backend, tmp_path, recipe(folder, LAYOUTS[layout], **ALGO)), expected
    )


@pytest.mark.thorough("nccl")
@pytest.mark.parametrize(
    "family, layout",
    [
        pytest.param("qwen3", "TP2 x PP2", marks=pytest.mark.thorough),
        ("qwen3_moe", "TP2 x PP2"),
        ("qwen2_moe", "TP2 x PP2"),
        ("qwen3_moe", "EP2 x TP2"),
    ],
)
def test_those_of_other_families_too(family, layout, alone, backend, tmp_path):
    folder, expected = alone(family, **ALGO)
    config = recipe(folder, {**LAYOUTS, **EXPERT_LAYOUTS}[layout], **ALGO)
    actual = train(backend, tmp_path, config)
    assert_same_training(actual, expected, rounding=ROUNDING.get(family, 1e-5))


@pytest.mark.parametrize(
    "family, layout", [("qwen2", dict(context=2)), ("qwen3", dict(tensor=2, context=2))]
)
def test_sequences_that_lie_end_to_end_train_as_padded_ones_do(
    family, layout, alone, backend, tmp_path
):
    folder, expected = alone(family, **ALGO)
    config = replace(recipe(folder, layout, **ALGO), train=TrainConfig(**PACKED))
    assert_same_training(train(backend, tmp_path, config), expected)


@pytest.mark.thorough("nccl")
def test_a_critic_has_the_values_of_the_whole_model(backend, qwen2, tmp_path):
    values, gradients, _ = critics.expected_of(qwen2)
    out = tmp_path / "critic.pt"
    config = recipe(qwen2, dict(context=2))
    run_with_stand_in(critics.observe, 2, backend, tmp_path, config, out)
    found = torch.load(out, weights_only=True)
    critics.assert_as_by_autograd(found, values, gradients, close=1e-4)


STAND_IN, LOCAL = run_with_stand_in, run_on_ranks


@pytest.mark.thorough("nccl")
@pytest.mark.parametrize(
    "family, saver, loader, before, after",
    [
        ("qwen3", STAND_IN, STAND_IN, dict(data=2), dict(data=2)),
        ("qwen3", STAND_IN, STAND_IN, dict(tensor=2), dict(pipeline=2)),
        ("qwen3", STAND_IN, LOCAL, dict(tensor=2), {}),
        ("qwen3", LOCAL, STAND_IN, {}, dict(tensor=2)),
        ("qwen3_moe", STAND_IN, LOCAL, dict(expert=2, data=2), dict(tensor=2)),
        ("qwen3_moe", LOCAL, STAND_IN, {}, dict(expert=2, data=2)),
    ],
    ids=[
        *("same layout", "another layout", "then on a CPU", "then on a GPU"),
        *("experts then on a CPU", "experts then on a GPU"),
    ],
)
def test_a_loaded_policy_takes_the_same_next_step(
    family, saver, loader, before, after, backend, tmp_path
):
    folder = tiny_checkpoint(tmp_path / "model", family)
    saving, loading = (recipe(folder, layout, dtype="bfloat16") for layout in (before, after))
    how = {"rounding": 0.0 if before == after else 1e-3, "runners": (saver, loader)}
    assert_goes_on(saving, loading, backend, tmp_path, **how)


@pytest.mark.thorough("nccl")
def test_shards_join_into_the_quantized_whole_bit_for_bit(backend, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "qwen3_moe", vocab_size=131)
    config = recipe(folder, dict(tensor=2, pipeline=2), dtype="bfloat16")
    out = tmp_path / "out"
    run_with_stand_in(publish, 4, backend, tmp_path, config, "int8", out, 0)
    assert_published(out / "0.pt", folder, "int8")
