"""The Megatron model is the Hugging Face model, however it is split."""

import pytest
import torch

from tests.support.cases import all_but
from tests.support.logits import IDS, LAYOUTS, assert_logits
from tests.support.models import FAMILIES, tiny_checkpoint


@pytest.mark.crossed
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_logits_equal_hugging_face(backend, family, layout, tmp_path):
    assert_logits(tiny_checkpoint(tmp_path / "model", family), layout, backend, tmp_path)


@pytest.mark.parametrize("family", all_but(FAMILIES, "qwen3", "llama", "mistral"))
def test_folding_uaq_leaves_the_function_as_it_was(family, backend, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", family)
    assert_logits(folder, dict(tensor=2), backend, tmp_path, uaq_scale=1.5)


@pytest.mark.crossed
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_a_vocabulary_that_does_not_divide_is_padded(tied, layout, backend, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "llama", vocab_size=131, tie_word_embeddings=tied)
    ids = torch.randint(0, 131, (2, 16), generator=torch.Generator().manual_seed(0))
    assert_logits(folder, layout, backend, tmp_path, ids=ids)


def test_llama3_rope_scaling_equals_hugging_face(backend, tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    }
    sizes = dict(rope_parameters=scaling, max_position_embeddings=16384, head_dim=64)
    folder = tiny_checkpoint(tmp_path / "model", "llama", **sizes)
    assert_logits(folder, {}, backend, tmp_path, ids=IDS.view(1, 32).repeat(1, 2))


def test_probabilities_of_experts_sum_to_less_than_one_where_the_config_says_so(backend, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "qwen3_moe", norm_topk_prob=False)
    assert_logits(folder, dict(tensor=2), backend, tmp_path)
