import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from qurl_megatron.checkpoints.job import run
from qurl_megatron.checkpoints.source import open_checkpoint
from qurl_megatron.checkpoints.to_huggingface import to_quantized
from qurl_megatron.engines.embedded.decoder import rms_norm
from qurl_megatron.engines.embedded.endpoints import load_engine
from qurl_megatron.engines.embedded.read_weights import read_weights
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.quant.export import CONFIGS
from qurl_megatron.tensors.arch import facts_of, read_eos, read_stop_ids
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.tensors.table import is_quantized
from qurl_megatron.wire.files import FilesSender
from qurl_megatron.wire.message import Message
from qurl_megatron.wire.session import UpdateEnd
from tests.support.engine_models import (
    TINY,
    decoding_by,
    engine_for,
    finish,
    published_tensors,
    random_tensors,
    sequence,
    write_model,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-scaled": {"model_type": "llama", "rope_scaling": LLAMA3},
    "llama-v5-config": {"model_type": "llama", "rope_parameters": LLAMA3},
}


def reference(folder):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@torch.inference_mode()
def reference_log_probs(model, done, temperature: float) -> torch.Tensor:
    logits = model(torch.tensor([done.prompt + done.output_ids])).logits[
        0, len(done.prompt) - 1 : -1
    ]
    rows = (logits / temperature).log_softmax(-1)
    return rows.gather(1, torch.tensor(done.output_ids)[:, None])[:, 0]


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_float32_log_probs_equal_transformers(changes, tmp_path):
    folder = write_model(tmp_path, **changes)
    sequences = [sequence(range(2 + i, 8 + 5 * i), 24, seed=i, temperature=0.8) for i in range(4)]
    finish(engine_for(folder), *sequences)
    model = reference(folder)
    for done in sequences:
        expected = reference_log_probs(model, done, 0.8)
        torch.testing.assert_close(torch.tensor(done.log_probs), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "scheme,largest", [("int8", 127.0), ("fp8", 448.0), ("int6", 31.0), ("int4", 7.0)]
)
@pytest.mark.parametrize("path", ["torch", "native"])
def test_quantized_log_probs_equal_a_fake_quant_float_reference(scheme, largest, path, tmp_path):
    folder = write_model(tmp_path, model_type="qwen3", head_dim=16)
    done = sequence(range(2, 30), 24, seed=1)
    with decoding_by(path):
        finish(engine_for(folder, scheme=scheme), done)
    model = reference(folder)
    plain = reference_log_probs(model, done, 1.0)

    def on_grid(x):
        scale = x.abs().amax(-1, keepdim=True) / largest
        codes = x / scale
        return (codes.round() if scheme != "fp8" else codes.to(torch.float8_e4m3fn).float()) * scale

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.weight.data = on_grid(module.weight.data)
            module.register_forward_pre_hook(lambda _, inputs: (on_grid(inputs[0]),))
    faked = reference_log_probs(model, done, 1.0)
    actual = torch.tensor(done.log_probs)
    # A float sum in another order, as another CPU takes it, can move one activation to the
    # neighbouring code; the reference must still be far nearer than the unquantized model.
    assert (actual - faked).abs().mean() < 0.05 * (actual - plain).abs().mean()


@pytest.mark.parametrize(
    "model,scheme", [("qwen2-tied", "none"), ("llama", "int8"), ("qwen3", "int4"), ("qwen3", "fp8")]
)
def test_an_update_session_brings_what_a_folder_brings(model, scheme, tmp_path):
    changes, sender = MODELS[model], FilesSender(tmp_path / "versions", "r0", leads=False)
    engine = engine_for(write_model(tmp_path / "old", **changes), scheme=scheme)
    other = write_model(tmp_path / "new", seed=1, **changes)
    published = published_tensors(random_tensors(other, seed=1), scheme)
    finish(engine, sequence(range(2, 30), 4))  # so that whatever is made at the first step is there
    sender.begin(1)
    blob = sender.put(0, [Shard.whole(name, tensor) for name, tensor in published.items()])
    end = UpdateEnd(engine.decoder)
    with torch.inference_mode():
        for action, index, blobs in (("bucket", 0, (blob,)), ("check", 1, ()), ("finish", 1, ())):
            end.handle(Message(action, "one", 1, index, sender.describe("engine-0", 1), blobs))
    assert [receipt.error for receipt in sender.receipts("one", 1)] == [None]
    updated, expected = (sequence(range(2, 30), 24, seed=1) for _ in range(2))
    finish(engine, updated)
    finish(engine_for(other, scheme=scheme), expected)
    assert (updated.output_ids, updated.log_probs) == (expected.output_ids, expected.log_probs)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_a_quantized_folder_is_served_as_it_is(scheme, tmp_path):
    """The codes and scales of the engine are those that our own export has written."""
    plain = write_model(tmp_path / "plain", model_type="qwen3", head_dim=16)
    out = tmp_path / "out"
    run(to_quantized(open_checkpoint(plain), out, scheme=scheme))
    engine = load_engine(out, scheme=scheme, dtype="float32", cache_gb=0.01, device="cpu")
    stored = load_file(next(out.glob("*.safetensors")))
    for name, slot in engine.decoder.slots.items():
        written = stored[name]
        if name.endswith("_scale"):
            assert written.dtype == torch.float32
            written = written.reshape(-1, 1)
        if scheme == "fp8" and is_quantized(name):
            written = written.to(slot.target.dtype)  # without FP8 hardware wide, the same values
        assert torch.equal(slot.target, written), name
    of_plain = load_engine(plain, scheme=scheme, dtype="float32", cache_gb=0.01, device="cpu")
    given, expected = (sequence(range(2, 30), 8, seed=1) for _ in range(2))
    finish(engine, given)
    finish(of_plain, expected)
    assert (given.output_ids, given.log_probs) == (expected.output_ids, expected.log_probs)
    assert facts_of(out) == facts_of(plain)
    other = "fp8" if scheme == "int8" else "int8"
    with pytest.raises(ConfigError, match=f"holds weights of scheme {scheme}, not {other}; give"):
        load_engine(out, scheme=other, dtype="float32", cache_gb=0.01, device="cpu")


def test_what_others_write_in_bf16_or_as_a_vector_is_read_and_half_a_block_is_not(tmp_path):
    folder = write_model(tmp_path / "m")
    decoder = engine_for(folder, scheme="int8").decoder
    tensors = published_tensors(random_tensors(folder, 0), "int8")
    theirs = {
        name: one.to(torch.bfloat16).flatten() if name.endswith("_scale") else one
        for name, one in tensors.items()
    }
    save_file(theirs, folder / "model.safetensors")
    read = read_weights(folder, decoder)
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(read[f"{name}_scale"], theirs[f"{name}_scale"].float()[:, None])
    save_file({**theirs, name: torch.zeros(32, 48)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{name} is torch.float32 where other layers are quant"):
        read_weights(folder, decoder)


def test_a_folder_in_squares_is_refused_by_name(tmp_path):
    folder = write_model(tmp_path / "m")
    squares = {"quantization_config": CONFIGS["fp8_block"]}
    (folder / "config.json").write_text(json.dumps({**TINY, **squares}))
    with pytest.raises(ConfigError, match="m holds weights of scheme fp8_block, which embedded en"):
        load_engine(folder, scheme="fp8", dtype="bfloat16", cache_gb=0.01, device="cpu")


def test_reading_a_folder_rejects_what_is_not_exactly_the_model(tmp_path):
    folder = write_model(tmp_path / "m")
    decoder = engine_for(folder, scheme="int8").decoder
    good = read_weights(folder, decoder)
    name = "model.layers.1.mlp.down_proj.weight"
    scale = torch.ones(32, 1)
    scale[3] = torch.nan
    bad_sets = {
        "missing": {k: v for k, v in good.items() if k != name},
        "unexpected": {**good, "model.layers.9.x": good[name]},
        r"\[48, 32\]": {**good, name: good[name].t()},
        "torch.float64": {**good, name: good[name].double()},
        "not positive and finite": {**good, f"{name}_scale": scale},
    }
    before = {name: slot.target.clone() for name, slot in decoder.slots.items()}
    for message, tensors in bad_sets.items():
        with pytest.raises(ConfigError, match=message):
            decoder.load(tensors)
    assert all(torch.equal(slot.target, before[n]) for n, slot in decoder.slots.items())


def test_rms_norm_normalizes_in_float32_and_scales_in_the_model_dtype():
    torch.manual_seed(0)
    x, w = torch.randn(4, 64).bfloat16() * 100, torch.randn(64).bfloat16()
    x32 = x.float()
    normal = (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    torch.testing.assert_close(rms_norm(x, w, 1e-6), w * normal, rtol=1e-2, atol=1e-6)


def test_generation_config_says_what_ends_a_response(tmp_path):
    folder = write_model(tmp_path)
    assert read_eos(folder) == (1,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    assert read_eos(folder) == (1, 5)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    stops = read_stop_ids(folder, of_tokenizer=[7])
    assert (stops.always, stops.known) == ({5}, {1, 5, 7})  # SGLang stops at config.json's, too
