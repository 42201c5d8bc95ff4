import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qurl_megatron.engines.sglang.loader import SGLangWeights
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.slice import Slice
from qurl_megatron.wire.session import pointers
from tests.support import sglang_lookalikes as lookalikes
from tests.support.sglang_lookalikes import Qwen2ForCausalLM, targets, whole_tensors

UNQUANTIZED, W8A8 = lookalikes.UnquantizedLinearMethod, lookalikes.W8A8Int8LinearMethod
BLOCKS = lookalikes.Fp8LinearMethod


def in_squares(monkeypatch) -> None:
    for name, size in lookalikes.SQUARES.items():
        monkeypatch.setattr(lookalikes, name, size)


@pytest.mark.parametrize("tp, ep", [(1, 0), (2, 0), (4, 0), (1, 1), (2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize(
    "method, scheme", [(UNQUANTIZED, "none"), (W8A8, "int8"), (BLOCKS, "fp8_block")]
)
def test_targets_have_the_names_shapes_and_parts_of_the_checkpoint(
    tp, ep, method, scheme, monkeypatch
):
    if method is BLOCKS:
        in_squares(monkeypatch)
    whole = whole_tensors(scheme=scheme, experts=ep > 0)
    held = {name: torch.zeros(value.shape, dtype=torch.int32) for name, value in whole.items()}
    for rank in range(tp):
        model = Qwen2ForCausalLM(rank=rank, tp=tp, ep=ep, method=method)
        assert SGLangWeights(model).tensor_rank() == rank
        found = targets(model)
        assert found.keys() == whole.keys()  # of other ranks' experts no rows
        for name, target in found.items():
            assert target.shape == whole[name].shape
            assert target.value.dtype == whole[name].dtype
            part = target.part.narrow(held[name], Slice.whole(target.shape))
            assert part.shape == target.value.shape
            part += 1
    for name, times in held.items():
        copies = set(times.flatten().tolist())
        if any(part in name for part in ("k_proj", "v_proj")):
            assert copies == {max(1, tp // lookalikes.KV_HEADS)}, name
        elif ".experts." in name and name.endswith("down_proj.weight_scale"):
            assert copies == {tp // ep}, name
        elif (
            "norm" in name
            or name.endswith(("o_proj.weight_scale", "down_proj.weight_scale"))
            or ".gate." in name
        ):
            assert copies == {tp}, name
        else:
            assert copies == {1}, name


def test_writing_through_a_target_writes_the_live_parameter():
    model = Qwen2ForCausalLM()
    found = targets(model)
    o_proj = model.model.layers[0].self_attn.o_proj
    found["model.layers.0.self_attn.o_proj.weight"].value[3, 5] = 7
    assert o_proj.weight[5, 3] == 7  # SGLang holds [in, out]
    found["model.layers.1.self_attn.k_proj.bias"].value[0] = 9.0
    assert model.model.layers[1].self_attn.qkv_proj.bias[lookalikes.HEADS * lookalikes.HEAD] == 9.0


def test_experts_are_written_where_they_lie():
    model = Qwen2ForCausalLM(rank=1, tp=2, ep=2)
    experts = model.model.layers[0].mlp.experts
    found = targets(model)
    found["model.layers.0.mlp.experts.3.up_proj.weight"].value[2, 5] = 7
    found["model.layers.0.mlp.experts.2.down_proj.weight_scale"].value[4] = 9.0
    assert experts.w13_weight[1, lookalikes.EXPERT + 2, 5] == 7
    assert experts.w2_weight_scale[0, 4, 0] == 9.0
    place, strides = experts.w13_weight.data_ptr(), experts.w13_weight.stride()
    SGLangWeights(model).finish()  # turns back linear layers alone
    assert (experts.w13_weight.data_ptr(), experts.w13_weight.stride()) == (place, strides)


def test_a_square_weight_is_turned_back_by_its_strides():
    model = Qwen2ForCausalLM()
    before = pointers(targets(model))
    o_proj = model.model.layers[0].self_attn.o_proj
    place = o_proj.weight.data_ptr()
    assert o_proj.weight.shape == (16, 16) and not o_proj.weight.is_contiguous()
    for _ in range(2):  # the second time there is nothing to do
        SGLangWeights(model).finish()
        assert o_proj.weight.is_contiguous()
    assert o_proj.weight.data_ptr() == place
    assert pointers(targets(model)) == before


def test_pointers_notice_a_parameter_that_moved():
    model = Qwen2ForCausalLM()
    before = pointers(targets(model))
    model.model.norm.weight.data = model.model.norm.weight.data.clone()
    assert pointers(targets(model)) != before


def test_a_tied_output_layer_comes_with_the_embedding():
    assert targets(Qwen2ForCausalLM(tied=True)).keys() == whole_tensors(tied=True).keys()


def test_an_unknown_model_is_refused():
    class GptOssForCausalLM(Qwen2ForCausalLM): ...

    with pytest.raises(ConfigError, match="GptOssForCausalLM are not supported"):
        targets(GptOssForCausalLM())


def compressed(**fields) -> Qwen2ForCausalLM:
    scheme = lookalikes.CompressedTensorsW8A8Fp8()
    vars(scheme).update({"strategy": "channel", "is_static_input_scheme": False, **fields})
    return Qwen2ForCausalLM(method=lookalikes.CompressedTensorsLinearMethod, scheme=scheme)


def test_compressed_tensors_are_known_with_a_scale_per_channel_and_dynamic_activations():
    assert targets(compressed()).keys() == whole_tensors().keys()
    with pytest.raises(ConfigError, match="weight scales per tensor"):
        targets(compressed(strategy="tensor"))
    with pytest.raises(ConfigError, match="static activation scales"):
        targets(compressed(is_static_input_scheme=True))


@pytest.mark.parametrize("ep", [0, 2])
def test_an_engine_with_attention_split_otherwise_is_refused(ep):
    model = Qwen2ForCausalLM(rank=1, tp=2, ep=ep)
    for layer in model.model.layers:  # as data-parallel attention does
        for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj):
            linear.tp_group = SimpleNamespace(rank_in_group=0, world_size=1)
    with pytest.raises(ConfigError, match="different groups"):
        SGLangWeights(model).tensor_rank()


def change(model: nn.Module, path: str, value: object) -> None:
    """Set an attribute of the model's layers."""
    owner, _, name = path.rpartition(".")
    setattr(functools.reduce(getattr, owner.split("."), model.model.layers), name, value)


@pytest.mark.parametrize(
    "path, value, said",
    [
        (
            "0.mlp.experts.runner_backend.value",
            "flashinfer_trtllm",
            r"mlp\.experts .* of flashinfer_trtllm; .*--moe-runner-backend triton",
        ),
        (
            "0.mlp.experts.__class__",
            lookalikes.DeepEPMoE,
            r"mlp\.experts .* of DeepEPMoE; .*no --moe-a2a-backend",
        ),
        (
            "0.mlp.experts.quant_method.w13_swiglu_interleaved",
            True,
            r"without SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED",
        ),
        (
            "0.mlp.experts.quant_method",
            SimpleNamespace(),
            r"mlp\.experts is quantized as SimpleNamespace; .*w8a8_fp8",
        ),
        (
            "0.mlp.experts.w13_weight_bias",
            nn.Parameter(torch.zeros(4, 16)),
            r"mlp\.experts\.w13_weight_bias",
        ),
        ("0.mlp.gate.quant_method", W8A8(), r"mlp\.gate is quantized"),
    ],
)
def test_experts_that_lie_otherwise_are_refused_by_name(path, value, said):
    model = Qwen2ForCausalLM(ep=1)
    change(model, path, value)
    with pytest.raises(ConfigError, match=said):
        targets(model)


SQUARE = "0.self_attn.qkv_proj.quant_method.quant_config.weight_block_size"


@pytest.mark.parametrize(
    "path, value, said",
    [
        (
            "1.self_attn.o_proj.weight_scale_inv.format_ue8m0",
            True,
            r"1\.self_attn\.o_proj .*powers of two .*SGLANG_ENABLE_JIT_DEEPGEMM=0",
        ),
        (
            "1.mlp.experts.w2_weight_scale_inv.format_ue8m0",
            True,
            r"1\.mlp\.experts .*powers of two",
        ),
        (SQUARE, [1, 32], r"qkv_proj has FP8 scales per \[1, 32\]"),
        (SQUARE, None, r"qkv_proj has FP8 scales per tensor"),
        ("1.self_attn.attn.v_scale_float", 0.5, r"1\.self_attn\.attn\.v_scale is 0\.5"),
    ],
)
def test_block_fp8_that_an_update_would_not_reach_or_would_spoil_is_refused_by_name(
    path, value, said, monkeypatch
):
    in_squares(monkeypatch)
    model = Qwen2ForCausalLM(ep=1, method=BLOCKS)
    targets(model)
    change(model, path, value)
    with pytest.raises(ConfigError, match=said):
        targets(model)


REPACKED = nn.Parameter(torch.zeros(24, 8, 2, dtype=torch.int8)[..., 0], requires_grad=False)


@pytest.mark.parametrize(
    "path, value, said",
    [
        ("1.mlp.extra", nn.Linear(2, 2, bias=False), r"model\.layers\.1\.mlp\.extra\.weight"),
        ("0.mlp.down_proj.input_scale", nn.Parameter(torch.ones(1)), r"down_proj\.input_scale"),
        ("0.mlp.down_proj.weight", REPACKED, r"down_proj\.weight .* repacked"),
    ],
)
def test_a_parameter_that_no_update_would_reach_is_refused_by_name(path, value, said):
    model = Qwen2ForCausalLM()
    change(model, path, value)
    with pytest.raises(ConfigError, match=said):
        targets(model)
