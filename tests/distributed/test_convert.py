"""Converted checkpoints are what megatron-core itself writes and reads, in every layout."""

import pytest
import torch

from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.checkpoints.huggingface import HfReader
from qurl_megatron.checkpoints.job import run
from qurl_megatron.checkpoints.source import open_checkpoint
from qurl_megatron.checkpoints.to_huggingface import to_huggingface
from qurl_megatron.checkpoints.to_megatron import to_megatron
from qurl_megatron.tensors.arch import read_config
from qurl_megatron.training.state import TrainState, latest
from tests.support.cases import all_but
from tests.support.logits import LAYOUTS, assert_logits
from tests.support.models import FAMILIES, tiny_checkpoint
from tests.support.policies import (
    EXPERT_LAYOUTS,
    build,
    improve_at,
    recipe,
    save_weights,
    whole,
)
from tests.support.policies import LAYOUTS as TRAINER_LAYOUTS
from tests.support.ranks import run_on_ranks


@pytest.mark.crossed
@pytest.mark.parametrize("family", all_but(FAMILIES, nccl=["qwen3_moe"]))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_megatron_core_loads_a_conversion_in_every_layout(family, layout, backend, tmp_path):
    # 101 rows do not divide over two ranks: the vocabulary is padded.
    hf = tiny_checkpoint(tmp_path / "hf", family, vocab_size=101)
    out = tmp_path / "megatron"
    run(to_megatron(open_checkpoint(hf), out, uaq_scale=1.5, tensor=2, file_bytes=20_000))
    assert_logits(hf, layout, backend, tmp_path, converted=out)


def train_and_save(device, config, run_dir, weights) -> None:
    from qurl_megatron.training import checkpoint

    with megatron_runtime(config.parallel) as ranks:
        policy = build(config, ranks, uaq_scale=1.5)
        improve_at(policy, config, 1)
        checkpoint.save(run_dir, policy, TrainState(step=1), keep=1)
        save_weights(policy, weights)


@pytest.mark.crossed
@pytest.mark.parametrize(
    "family, layout",
    [
        ("qwen2", "TP2 x PP2"),
        ("qwen2", "TP2 x DP2"),
        ("qwen3_moe", "TP2 x PP2"),
        ("qwen3_moe", "EP2 x DP4"),
        ("qwen3_moe", "EP2 x PP2"),
        ("qwen2_moe", "EP2 x PP2"),
    ],
)
def test_a_trained_checkpoint_converts_from_its_fp32_masters(family, layout, backend, tmp_path):
    hf = tiny_checkpoint(tmp_path / "hf", family)
    config = recipe(hf, {**TRAINER_LAYOUTS, **EXPERT_LAYOUTS}[layout], dtype="bfloat16")
    ranks, saved = config.parallel.world_size, tmp_path / "weights.pt"
    run_on_ranks(train_and_save, ranks, backend, tmp_path, config, tmp_path / "run", saved)
    masters = torch.load(saved)

    trained = open_checkpoint(tmp_path / "run")
    assert trained.folder == latest(tmp_path / "run") and trained.uaq_scale == 1.5
    run(to_huggingface(trained, tmp_path / "folded"))
    folded = HfReader(tmp_path / "folded")
    assert folded.stored.keys() == masters.keys()
    for name, value in masters.items():
        assert torch.equal(folded.whole(name), value), name
    assert read_config(tmp_path / "folded")["qurl"]["uaq_scale"] == 1.5


def check_start(device, *configs) -> None:
    """Two recipes begin with the same FP32 masters."""
    found = []
    for config in configs:
        with megatron_runtime(config.parallel) as ranks:
            policy = build(config, ranks, uaq_scale=1.5)
            assert policy.uaq_scale == 1.5
            found.append(whole(policy))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("family", all_but(["llama", "qwen2", "qwen3_moe"], nccl=["qwen2"]))
def test_training_starts_alike_from_hugging_face_and_from_its_conversion(family, backend, tmp_path):
    hf = tiny_checkpoint(tmp_path / "hf", family, vocab_size=101)
    run(to_megatron(open_checkpoint(hf), tmp_path / "megatron", uaq_scale=1.5, tensor=2))
    layout = dict(tensor=2, pipeline=2)
    recipes = [recipe(folder, layout, dtype="bfloat16") for folder in (hf, tmp_path / "megatron")]
    run_on_ranks(check_start, 4, backend, tmp_path, *recipes)
