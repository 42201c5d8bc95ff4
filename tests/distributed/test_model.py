"""The Megatron model is the Hugging Face model, however it is split."""

import pytest
import torch

from qurl_megatron.actor.megatron import megatron_runtime
from qurl_megatron.checkpoints.huggingface import HfReader
from qurl_megatron.config import ModelConfig, ParallelConfig
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import read_arch, read_config
from tests.support.cases import all_but
from tests.support.logits import LAYOUTS, check_logits, hf_logits
from tests.support.models import FAMILIES, tiny_checkpoint
from tests.support.ranks import run_on_ranks


@pytest.mark.crossed
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tensor, pipeline", LAYOUTS)
def test_logits_equal_hugging_face(backend, family, tensor, pipeline, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", family)
    ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(0))
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
    expected = hf_logits(folder, ids)
    run_on_ranks(
        check_logits, parallel.world_size, backend, tmp_path, folder, parallel, 1.0, ids, expected
    )


@pytest.mark.parametrize("family", all_but(FAMILIES, "qwen3", "llama", "mistral"))
def test_folding_uaq_leaves_the_function_as_it_was(family, backend, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", family)
    ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(0))
    parallel = ParallelConfig(tensor=2)
    run_on_ranks(
        check_logits, 2, backend, tmp_path, folder, parallel, 1.5, ids, hf_logits(folder, ids)
    )


@pytest.mark.crossed
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tensor, pipeline", [(2, 1), (1, 2), (2, 2)])
def test_a_vocabulary_that_does_not_divide_is_padded(tied, tensor, pipeline, backend, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "llama", vocab_size=131, tie_word_embeddings=tied)
    ids = torch.randint(0, 131, (2, 16), generator=torch.Generator().manual_seed(0))
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
    expected = hf_logits(folder, ids)
    run_on_ranks(
        check_logits, parallel.world_size, backend, tmp_path, folder, parallel, 1.0, ids, expected
    )


def test_llama3_rope_scaling_equals_hugging_face(backend, tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    }
    folder = tiny_checkpoint(
        tmp_path / "model",
        "llama",
        rope_parameters=scaling,
        max_position_embeddings=16384,
        head_dim=64,
    )
    ids = torch.randint(0, 128, (1, 64), generator=torch.Generator().manual_seed(0))
    run_on_ranks(
        check_logits,
        1,
        backend,
        tmp_path,
        folder,
        ParallelConfig(),
        1.0,
        ids,
        hf_logits(folder, ids),
    )


def test_probabilities_of_experts_sum_to_less_than_one_where_the_config_says_so(backend, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "qwen3_moe", norm_topk_prob=False)
    ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(0))
    parallel = ParallelConfig(tensor=2)
    run_on_ranks(
        check_logits, 2, backend, tmp_path, folder, parallel, 1.0, ids, hf_logits(folder, ids)
    )


def test_experts_split_over_ranks_without_sequence_parallelism_are_refused(tmp_path):
    from qurl_megatron.actor.build import transformer_config

    arch = read_arch(read_config(tiny_checkpoint(tmp_path, "qwen3_moe")))
    parallel = ParallelConfig(tensor=2, sequence=False)
    with pytest.raises(ConfigError, match="parallel.sequence=false is not supported for models"):
        transformer_config(arch, ModelConfig(path=str(tmp_path)), parallel)


def check_checkpoint_keys(device, folder, expected) -> None:
    from qurl_megatron.actor.build import build_model, transformer_config

    parallel = ParallelConfig()
    with megatron_runtime(parallel) as ranks:
        arch = read_arch(read_config(folder))
        model = build_model(
            arch, transformer_config(arch, ModelConfig(path=str(folder)), parallel), ranks
        )
        # One key for the tensors of all layers, and of all experts.
        state = model.sharded_state_dict(metadata={"singleton_local_shards": False})
        layer = "decoder.layers."
        keys = {tensor.key.removeprefix(layer) for tensor in state.values() if layer in tensor.key}
        assert {key for key in keys if not key.endswith("_extra_state")} == expected


@pytest.mark.parametrize(
    "family, mlp",
    [
        (
            "gemma",
            {
                "mlp.linear_fc1.layer_norm_weight",
                "mlp.linear_fc1.weight",
                "mlp.linear_fc2.weight",
            },
        ),
        (
            "qwen3_moe",
            {
                "self_attention.q_layernorm.weight",
                "self_attention.k_layernorm.weight",
                "pre_mlp_layernorm.weight",
                "mlp.router.weight",
                "mlp.experts.experts.linear_fc1.weight",
                "mlp.experts.experts.linear_fc2.weight",
            },
        ),
    ],
)
def test_checkpoints_use_the_keys_of_transformer_engine(family, mlp, backend, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", family)
    attention = {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
    }
    run_on_ranks(check_checkpoint_keys, 1, backend, tmp_path, folder, attention | mlp)


def check_embedding(device, folder, ids, expected_BSH) -> None:
    from qurl_megatron.actor.build import build_model, load_weights, transformer_config

    parallel = ParallelConfig()
    with megatron_runtime(parallel) as ranks:
        arch = read_arch(read_config(folder))
        model_config = ModelConfig(path=str(folder), dtype="bfloat16")
        model = build_model(arch, transformer_config(arch, model_config, parallel), ranks)
        load_weights(model, arch, ranks, HfReader(folder), 1.0)
        actual = model.embedding(input_ids=ids.to(device), position_ids=None).transpose(0, 1)
        assert torch.equal(actual.cpu(), expected_BSH)


def test_bf16_embeddings_are_scaled_by_the_factor_that_hugging_face_rounds(backend, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tiny_checkpoint(tmp_path / "model", "gemma")
    ids = torch.arange(128)[None]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    expected = model.get_input_embeddings()(ids).detach()
    run_on_ranks(check_embedding, 1, backend, tmp_path, folder, ids, expected)
