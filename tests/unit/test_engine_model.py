import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad, silu

from qurl_megatron.checkpoints.job import run
from qurl_megatron.checkpoints.source import open_checkpoint
from qurl_megatron.checkpoints.to_huggingface import to_quantized
from qurl_megatron.engines.embedded.decoder import rms_norm
from qurl_megatron.engines.embedded.endpoints import load_engine
from qurl_megatron.engines.embedded.read_weights import read_weights
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.schemes import SCALES
from qurl_megatron.tensors.arch import facts_of, read_eos, read_stop_ids
from qurl_megatron.tensors.slice import Shard
from qurl_megatron.tensors.table import is_quantized
from qurl_megatron.wire.files import FilesSender
from qurl_megatron.wire.message import Message
from qurl_megatron.wire.session import UpdateEnd
from tests.support.engine_models import (
    EXPERTS,
    SHARED,
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
    "qwen3-moe": EXPERTS,
    "qwen2-moe": SHARED,
    "qwen3-moe, weights as they are": {**EXPERTS, "norm_topk_prob": False},
}
SIZES = {"fp8_block": dict(hidden_size=160, intermediate_size=200, moe_intermediate_size=128)}
"""For several squares, some of them at an edge."""
WHOLE = dict(hidden_size=256, intermediate_size=128, moe_intermediate_size=128, head_dim=64)
"""For whole squares alone, which other engines need, and exports have."""


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


def dense_experts(module, on_grid, x_TH, expert_Tk, weight_Tk):
    """All experts' products with all tokens, of which those that were not chosen weigh nothing."""
    gate_up_ETO = on_grid(x_TH) @ module.gate_up_proj.mT
    gate, up = gate_up_ETO.chunk(2, dim=-1)
    y_ETH = on_grid(silu(gate) * up) @ module.down_proj.mT
    weight_TE = torch.zeros(len(x_TH), len(y_ETH)).scatter(1, expert_Tk, weight_Tk)
    return torch.einsum("te,eth->th", weight_TE, y_ETH)


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
    "scheme,largest",
    [("int8", 127.0), ("fp8", 448.0), ("fp8_block", 448.0), ("int6", 31.0), ("int4", 7.0)],
)
@pytest.mark.parametrize("path", ["torch", "native"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "qwen2-moe"])
def test_quantized_log_probs_equal_a_fake_quant_float_reference(
    family, scheme, largest, path, tmp_path
):
    folder = write_model(tmp_path, **MODELS[family] | SIZES.get(scheme, {}))
    done = sequence(range(2, 30), 24, seed=1)
    with decoding_by(path):
        finish(engine_for(folder, scheme=scheme), done)
    model = reference(folder)
    plain = reference_log_probs(model, done, 1.0)

    def on_grid(x, height=1):
        """Tokens, or with the height of a square weights."""
        *batch, rows, columns = x.shape
        width = 128 if scheme == "fp8_block" else columns
        padded = pad(x, (0, -columns % width, 0, -rows % height))
        x_RhCw = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
        scale = x_RhCw.abs().amax((-3, -1), keepdim=True) / largest
        codes = x_RhCw / scale
        codes = codes.to(torch.float8_e4m3fn).float() if "fp8" in scheme else codes.round()
        return (codes * scale).view(*padded.shape)[..., :rows, :columns]

    height = 128 if scheme == "fp8_block" else 1
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.weight.data = on_grid(module.weight.data, height)
            module.register_forward_pre_hook(lambda _, inputs: (on_grid(inputs[0]),))
        if name.endswith(".experts"):  # all of a layer in two tensors
            for weight in module.parameters():
                weight.data = on_grid(weight.data, height)
            module.forward = functools.partial(dense_experts, module, on_grid)
    faked = reference_log_probs(model, done, 1.0)
    actual = torch.tensor(done.log_probs)
    # A float sum in another order, as another CPU takes it, can move one activation to the
    # neighbouring code; the reference must still be far nearer than the unquantized model.
    assert (actual - faked).abs().mean() < 0.05 * (actual - plain).abs().mean()


@pytest.mark.parametrize(
    "model,scheme",
    [
        *(("qwen2-tied", "none"), ("llama", "int8"), ("qwen3", "int4"), ("qwen3", "fp8")),
        *(("qwen3-moe", scheme) for scheme in ("none", "int8", "fp8", "fp8_block")),
    ],
)
def test_an_update_session_brings_what_a_folder_brings(model, scheme, tmp_path):
    changes = MODELS[model] | SIZES.get(scheme, {})
    sender = FilesSender(tmp_path / "versions", "r0", leads=False)
    engine = engine_for(write_model(tmp_path / "old", **changes), scheme=scheme)
    other = write_model(tmp_path / "new", seed=1, **changes)
    published = published_tensors(random_tensors(other, seed=1), scheme)
    finish(engine, sequence(range(2, 30), 4))  # so that whatever is made at the first step is there
    sender.begin(1)
    blob = sender.put(0, [Shard.whole(name, tensor) for name, tensor in published.items()])
    end = UpdateEnd(engine.decoder)
    with torch.inference_mode():
        for action, index, blobs in (("bucket", 0, (blob,)), ("check", 1, ()), ("finish", 1, ())):
            end.handle(Message(action, "one", index, sender.describe("engine-0", 1), blobs))
    assert [receipt.error for receipt in sender.receipts("one", 1)] == [None]
    updated, expected = (sequence(range(2, 30), 24, seed=1) for _ in range(2))
    finish(engine, updated)
    finish(engine_for(other, scheme=scheme), expected)
    assert (updated.output_ids, updated.log_probs) == (expected.output_ids, expected.log_probs)


@pytest.mark.parametrize("scheme", ["int8", "fp8", "fp8_block"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_a_quantized_folder_is_served_as_it_is(family, scheme, tmp_path):
    """The codes and scales of the engine are those that our own export has written."""
    sizes = WHOLE if scheme == "fp8_block" else {}
    plain = write_model(tmp_path / "plain", **MODELS[family] | sizes)
    out = tmp_path / "out"
    run(to_quantized(open_checkpoint(plain), out, scheme=scheme))
    engine = load_engine(out, scheme=scheme, dtype="float32", cache_gb=0.01, device="cpu")
    stored = load_file(next(out.glob("*.safetensors")))
    for name, slot in engine.decoder.slots.items():
        written = stored[name]
        if name.endswith(SCALES):
            assert written.dtype == torch.float32
            written = written.reshape(slot.target.shape)
        if scheme != "int8" and is_quantized(name):
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


@torch.inference_mode()
def test_a_forward_pass_gives_back_the_experts_that_transformers_chooses(tmp_path):
    engine, ids = engine_for(write_model(tmp_path, **EXPERTS)), torch.arange(2, 62)
    experts: list[torch.Tensor] = []
    engine.cache.reach(0, 1, len(ids))
    attend = engine.cache.attend_prefill(torch.tensor([0]), len(ids))
    engine.decoder.forward(ids, torch.arange(len(ids)), attend, experts)
    model, expected = reference(tmp_path), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, inputs, outputs: expected.append(outputs[2]))
    model(ids[None])
    assert torch.equal(torch.stack(experts), torch.stack(expected))


@pytest.mark.parametrize("path", ["torch", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 40])
@torch.inference_mode()
def test_experts_give_a_token_the_same_bits_whoever_else_they_serve(tokens, dtype, path, tmp_path):
    with decoding_by(path):
        engine = engine_for(write_model(tmp_path, **EXPERTS), scheme="int8", dtype=dtype)
        mlp, matrices = engine.decoder.layers[0].mlp, engine.decoder.layers[0].matrices
        assert {matrix.blocks is not None for matrix in matrices} == {path == "native"}
        generator = torch.Generator().manual_seed(3)
        x_TH, addend_TH = torch.randn(2, tokens, 32, generator=generator).to(dtype)
        actual, expert_Tk = mlp(x_TH, addend_TH)
        weight_Tk, _ = mlp.route(x_TH)
        for token in range(tokens):
            expected_H = addend_TH[token].float()
            for weight, expert in zip(weight_Tk[token], expert_Tk[token], strict=True):
                expected_H = expected_H.addcmul(weight, mlp.mlps[expert](x_TH[token, None])[0])
            assert torch.equal(actual[token], expected_H.to(dtype))


def test_generation_config_says_what_ends_a_response(tmp_path):
    folder = write_model(tmp_path)
    assert read_eos(folder) == (1,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    assert read_eos(folder) == (1, 5)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    stops = read_stop_ids(folder, of_tokenizer=[7])
    assert (stops.always, stops.known) == ({5}, {1, 5, 7})  # SGLang stops at config.json's, too
