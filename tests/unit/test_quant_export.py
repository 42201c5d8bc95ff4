"""Layouts of quantized checkpoints: round trips, and what their readers make of them.

compressed-tensors' own classes and transformers' loader are the readers that run without a GPU.
"""

import json

import pytest
import torch

from qurl_megatron.checkpoints.job import run
from qurl_megatron.checkpoints.source import open_checkpoint
from qurl_megatron.checkpoints.to_huggingface import to_quantized
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.quant import dequantize, quantize, quantize_tokens
from qurl_megatron.quant.export import (
    COMPRESSED_BLOCKS,
    loaded,
    quantization_config,
    read_quantization,
    stored,
    stored_shapes,
)
from qurl_megatron.schemes import EXPORTED, SCHEMES
from qurl_megatron.tensors.table import is_quantized
from tests.support.engine_models import write_model
from tests.support.shards import same

NAME = "model.layers.0.mlp.down_proj.weight"
SCALE = f"{NAME}_scale"
# The names of the same schemes in compressed-tensors and llm-compressor.
PRESETS = {"int8": "W8A8", "fp8": "FP8_DYNAMIC", "fp8_block": "FP8_BLOCK"}


def weight(rows=256, columns=384, dtype=torch.float32):
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.02
    w[3] = 0.0
    return w.to(dtype)


@pytest.mark.parametrize("scheme", EXPORTED)
@pytest.mark.parametrize("rows,columns", [(256, 384), (128, 128), (640, 128)])
def test_what_is_stored_is_what_was_announced_and_reads_back_the_same(scheme, rows, columns):
    quantized = quantize(weight(rows, columns), scheme)
    tensors = stored(NAME, quantized, scheme)
    announced = stored_shapes(NAME, (rows, columns), scheme)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == announced
    assert list(tensors) == [NAME, NAME + SCHEMES[scheme].scale]
    again = loaded(NAME, tensors, scheme)
    assert same(again.values, quantized.values) and same(again.scale, quantized.scale)
    assert again.block == quantized.block


@pytest.mark.parametrize(
    "found",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},  # one scale per tensor, static
    ],
    ids=lambda found: found["quant_method"],
)
def test_other_quantizations_are_refused_by_name(found):
    with pytest.raises(ConfigError, match=found.get("quant_algo") or found["quant_method"]):
        read_quantization({"quantization_config": found})


def test_two_schemes_in_one_checkpoint_are_refused():
    config = quantization_config("fp8", [])
    group = config["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = {**group, "targets": ["re:.*down_proj"]}
    with pytest.raises(ConfigError, match="float-quantized"):
        read_quantization({"quantization_config": config})


def test_scales_as_other_writers_store_them_are_read():
    quantized = quantize(weight(), "fp8")
    for scale in (quantized.scale.bfloat16(), quantized.scale.squeeze(1)):
        tensors = {NAME: quantized.values, SCALE: scale}
        again = loaded(NAME, tensors, "fp8")
        torch.testing.assert_close(again.scale, scale.float().reshape(-1, 1), rtol=0, atol=0)


def test_a_wrong_checkpoint_is_refused_with_the_name_of_the_tensor():
    quantized = quantize(weight(), "int8")
    good = stored(NAME, quantized, "int8")
    for change, message in [
        ({NAME: good[NAME].float()}, rf"{NAME} is torch.float32"),
        ({SCALE: good[SCALE][:7]}, rf"{SCALE} is torch.float32 \[7, 1\]"),
        ({SCALE: good[SCALE].int()}, rf"{SCALE} is torch.int32"),
    ]:
        with pytest.raises(ConfigError, match=message):
            loaded(NAME, {**good, **change}, "int8")
    with pytest.raises(ConfigError, match=f"{SCALE} is missing"):
        loaded(NAME, {NAME: good[NAME]}, "int8")


def test_blocks_that_no_engine_runs_are_refused():
    for shape in [(576, 1536), (1536, 576)]:
        with pytest.raises(ConfigError, match=rf"{NAME} is \[{shape[0]}, {shape[1]}\]"):
            stored_shapes(NAME, shape, "fp8_block")


@pytest.mark.parametrize("scheme", EXPORTED)
def test_compressed_tensors_reads_the_config_as_its_own_preset(scheme):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    ours = quantization_config(scheme, ["lm_head"])
    if scheme == "fp8_block":
        ours = {**COMPRESSED_BLOCKS, "ignore": ["lm_head"]}
    preset = quantization.preset_name_to_scheme(PRESETS[scheme], targets=["Linear"])
    read = quantization.QuantizationConfig.model_validate(ours)
    assert read.config_groups["group_0"] == preset and read.ignore == ["lm_head"]

    written = quantization.QuantizationConfig(
        config_groups={"group_0": preset}, format=ours["format"], ignore=["lm_head"]
    )
    theirs = json.loads(written.model_dump_json())
    assert read_quantization({"quantization_config": theirs}) == scheme
    theirs["config_groups"] = {PRESETS[scheme]: theirs["config_groups"]["group_0"]}
    assert read_quantization({"quantization_config": theirs}) == scheme


# Sizes for each scheme; blocks need multiples of 128.
MODELS = {
    "int8": {"hidden_size": 64, "intermediate_size": 96},
    "fp8": {"hidden_size": 64, "intermediate_size": 96, "model_type": "llama"},
    "fp8_block": {"hidden_size": 256, "intermediate_size": 128},
}
IDS = torch.arange(2, 34)


@torch.inference_mode()
def transformers_logits(folder, prepare=lambda model: None):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prepare(model)
    return model(IDS[None]).logits[0]


def fake_quant_logits(plain, scheme, tokens=quantize_tokens):
    """The float32 model with weights and activations moved to their grids."""

    def on_grid(_, inputs):
        values, scale = tokens(inputs[0], scheme)
        width = values.shape[-1] // scale.shape[-1]
        return (values.float() * scale.repeat_interleave(width, -1),)

    def prepare(model):
        for name, module in model.named_modules():
            if is_quantized(name + ".weight"):
                module.weight.data = dequantize(quantize(module.weight.data, scheme))
                module.register_forward_pre_hook(on_grid)

    return transformers_logits(plain, prepare)


def compressed_tensors_tokens(x, scheme):
    """How its emulation quantizes INT8 activations: amax onto 127.5, half the range of a byte."""
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    return (x / scale).clamp(-128, 127).round(), scale


def distance(a, b):
    return (a - b).square().mean().sqrt()


def tokens_as_they_are(x, scheme):
    return x, torch.ones(*x.shape[:-1], 1)


@pytest.mark.parametrize("scheme", MODELS)
def test_transformers_compute_a_checkpoint_as_a_fake_quant_model(scheme, tmp_path, monkeypatch):
    pytest.importorskip("compressed_tensors")
    plain = write_model(tmp_path / "plain", **MODELS[scheme])
    how = {"scheme": scheme, "dtype": torch.float32}
    run(to_quantized(open_checkpoint(plain), tmp_path / "quantized", **how))
    expected = fake_quant_logits(plain, scheme)
    error = distance(expected, transformers_logits(plain))  # of the quantization itself

    if scheme == "fp8_block":  # which it dequantizes where there is no GPU
        name = "transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available"
        monkeypatch.setattr(name, lambda: True)  # it is asked for, and not needed
        expected = fake_quant_logits(plain, scheme, tokens_as_they_are)
    actual = transformers_logits(tmp_path / "quantized")
    if scheme == "int8":
        own = fake_quant_logits(plain, scheme, compressed_tensors_tokens)
        torch.testing.assert_close(actual, own, rtol=0, atol=1e-5)
        # With another scale every activation rounds anew: as far from ours as ours from the
        # unquantized model. Measured: 1.16 times as far.
        assert distance(actual, expected) < 1.5 * error
    else:
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
