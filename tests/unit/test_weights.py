"""Ops invert, commute with sharding, and UAQ leaves the INT8 codes of step 0 where they were."""

import pytest
import torch

from qurl_megatron.checkpoints.ops import FusedQKV, GateUp
from qurl_megatron.checkpoints.uaq import fold_uaq, unfold_uaq
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import FAMILIES, FIXED, read_arch, read_config
from qurl_megatron.tensors.table import HfTensor
from tests.support.descriptions import QWEN2
from tests.support.models import tiny_checkpoint


def named(*names: str) -> tuple[HfTensor, ...]:
    return tuple(HfTensor(name, (), 0) for name in names)


def test_qkv_rows_are_interleaved_per_group():
    op = FusedQKV("qkv", named("q", "k", "v"), head_dim=1, queries_per_group=2)
    q, k, v = (torch.tensor(x).float()[:, None] for x in ([0, 1, 2, 3], [10, 11], [20, 21]))
    fused = op.to_megatron({"q": q, "k": k, "v": v})
    assert fused[:, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


@pytest.mark.parametrize("width", [(), (6,)], ids=["bias", "weight"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_fused_ops_invert_and_commute_with_sharding(width, ranks):
    qkv = FusedQKV("qkv", named("q", "k", "v"), head_dim=4, queries_per_group=3)
    rows = {"q": 2 * 3 * 4, "k": 2 * 4, "v": 2 * 4}
    for op, sizes in ((qkv, rows), (GateUp("fc1", named("gate", "up")), {"gate": 8, "up": 8})):
        hf = {name: torch.randn(size, *width) for name, size in sizes.items()}
        for rank in range(ranks):
            shard = {name: x.chunk(ranks)[rank] for name, x in hf.items()}
            back = op.to_hf(op.to_megatron(shard))
            assert all(torch.equal(back[name], shard[name]) for name in hf)


def test_folding_scales_norms_up_and_their_readers_down():
    config = {"model_type": "qwen2"}
    ones = torch.ones(2, 2)
    state = {
        "model.layers.0.input_layernorm.weight": torch.ones(2),
        "model.layers.0.self_attn.q_proj.weight": ones,
        "model.layers.0.self_attn.q_proj.bias": torch.ones(2),
        "model.layers.0.self_attn.o_proj.weight": ones,
        "model.layers.0.self_attn.q_norm.weight": torch.ones(2),
        "model.layers.0.mlp.down_proj.weight": ones,
        "model.layers.0.mlp.up_proj.weight": ones,
        "model.norm.weight": torch.ones(2),
    }
    folded = fold_uaq(state, config, 2.0)
    assert {name: value.flatten()[0].item() for name, value in folded.items()} == {
        "model.layers.0.input_layernorm.weight": 2.0,
        "model.layers.0.self_attn.q_proj.weight": 0.5,
        "model.layers.0.self_attn.q_proj.bias": 1.0,
        "model.layers.0.self_attn.o_proj.weight": 1.0,
        "model.layers.0.self_attn.q_norm.weight": 1.0,
        "model.layers.0.mlp.down_proj.weight": 1.0,
        "model.layers.0.mlp.up_proj.weight": 0.5,
        "model.norm.weight": 1.0,
    }
    assert config["qurl"] == {"uaq_scale": 2.0}
    back = unfold_uaq(folded, config)
    assert all(torch.equal(back[name], state[name]) for name in state) and "qurl" not in config


def test_folding_a_family_whose_norms_are_unknown_is_refused():
    with pytest.raises(ConfigError, match="model_type 'gemma2' is not supported"):
        fold_uaq({}, {"model_type": "gemma2"}, 1.5)


def test_folding_twice_is_refused():
    config = {"model_type": "qwen2"}
    fold_uaq({}, config, 1.5)
    with pytest.raises(ConfigError, match=r"already has the UAQ factor 1.5"):
        fold_uaq({}, config, 1.5)


LINEAR_ROPE = {"rope_type": "linear"}
HALF_OF_LLAMA3 = {"rope_type": "llama3", "factor": 2.0}


@pytest.mark.parametrize(
    "change, message",
    [
        *(({key: 7}, f"{key}=7 is not supported; it must be ") for key in FIXED),
        ({"model_type": "gemma2"}, "model_type 'gemma2' is not supported; known: llama, mistral, "),
        ({"quantization_config": {"bits": 8}}, "give the checkpoint they were made from"),
        ({"rope_parameters": LINEAR_ROPE}, "rope_type 'linear' is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not"),
        ({"rope_parameters": HALF_OF_LLAMA3}, "lacks the key 'low_freq_factor'"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias=true is not"),
        ({"layer_types": ["full_attention", "other"]}, 'layer_types="other" is not supported'),
        ({"model_type": "mistral", "sliding_window": 9}, "sliding_window=9 is not supported"),
        ({"qkv_bias": False}, "qkv_bias=false is not supported; it must be true"),
        ({"model_type": "qwen3_moe"}, "config.json lacks the key 'num_local_experts'"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(change, message):
    with pytest.raises(ConfigError) as error:
        read_arch({**QWEN2, **change})
    assert message in str(error.value)


def test_real_mistral_configs_are_understood():
    sizes = {
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_attention_heads": 8,
        "num_hidden_layers": 18,
        "num_key_value_heads": 1,
        "vocab_size": 256000,
    }
    mistral = {"model_type": "mistral", "head_dim": None, "sliding_window": None, **sizes}
    assert read_arch(mistral).head_dim == 256
    assert not read_arch(mistral).tied
    del mistral["sliding_window"]  # and transformers takes 4096
    with pytest.raises(ConfigError, match="sliding_window=4096 is not supported; it must be null"):
        read_arch(mistral)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_size_of_a_head_that_a_config_leaves_out_is_transformers(family):
    from transformers import AutoConfig

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 128, "sliding_window": None}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    experts["shared_expert_intermediate_size"] = 48
    theirs = getattr(AutoConfig.for_model(family, **sizes), "head_dim", 64 // 4)
    assert read_arch({"model_type": family, **sizes, **experts}).head_dim == theirs


def test_layouts_that_do_not_divide_are_refused_with_those_that_do(tmp_path):
    arch = read_arch(read_config(tiny_checkpoint(tmp_path, "qwen2")))
    with pytest.raises(ConfigError, match=r"tensor=3 does not divide .*use one of \[1, 2\]"):
        arch.check_parallel(3, 1)
    with pytest.raises(ConfigError, match=r"pipeline=3 does not divide .*use one of \[1, 2, 4\]"):
        arch.check_parallel(1, 3)
    experts = read_config(tiny_checkpoint(tmp_path / "moe", "qwen3_moe", moe_intermediate_size=3))
    with pytest.raises(ConfigError, match=r"moe_intermediate_size=3; use one of \[1\]"):
        read_arch(experts).check_parallel(2, 1)
    read_arch(experts).check_parallel(2, 1, 2)  # experts are whole
    with pytest.raises(ConfigError, match=r"expert=3 does not .* num_experts=4; use one of \[1, 2"):
        read_arch(experts).check_parallel(1, 1, 3)
    with pytest.raises(ConfigError, match=r"num_experts_per_tok=5 is more than num_experts=4$"):
        read_arch({**experts, "num_experts_per_tok": 5})
    with pytest.raises(
        ConfigError, match="expert=2 deals experts to ranks, and the model has none"
    ):
        arch.check_parallel(1, 1, 2)
