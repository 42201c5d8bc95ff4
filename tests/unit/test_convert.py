"""Conversions lose nothing there and back, and appear whole or not at all."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qurl_megatron.checkpoints.diff import differences
from qurl_megatron.checkpoints.huggingface import HfReader
from qurl_megatron.checkpoints.integrity import all_damage
from qurl_megatron.checkpoints.job import run
from qurl_megatron.checkpoints.ops import hf_shapes, parameter_count
from qurl_megatron.checkpoints.source import open_checkpoint
from qurl_megatron.checkpoints.to_huggingface import to_huggingface, to_quantized
from qurl_megatron.checkpoints.to_megatron import to_megatron
from qurl_megatron.checkpoints.torch_dist import TorchDistReader
from qurl_megatron.checkpoints.uaq import fold_uaq
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.quant import quantize
from qurl_megatron.tensors.arch import read_config
from tests.support.disks import flip
from tests.support.models import FAMILIES, tiny_checkpoint
from tests.support.tools import tool

SMALL = 20_000  # bytes to a file, so that even a tiny model has many


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    reader = HfReader(folder)
    return {name: reader.whole(name).clone() for name in reader.stored}


def there_and_back(hf: Path, out: Path, *, scale: float, tensor=2, **back) -> Path:
    there = to_megatron(
        open_checkpoint(hf), out / "megatron", uaq_scale=scale, tensor=tensor, file_bytes=SMALL
    )
    run(there)
    run(to_huggingface(open_checkpoint(out / "megatron"), out / "hf", file_bytes=SMALL, **back))
    return out / "hf"


@pytest.mark.crossed
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_round_trip_is_exact(family, tensor, tmp_path):
    hf = tiny_checkpoint(tmp_path / "model", family, vocab_size=101)
    back = there_and_back(hf, tmp_path, scale=1.0, tensor=tensor)
    before, after = tensors(hf), tensors(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert read_config(back) == read_config(hf)
    arch, table = open_checkpoint(hf).arch, TorchDistReader(tmp_path / "megatron").tensors
    assert hf_shapes(arch) == {name: tuple(x.shape) for name, x in before.items()}
    assert parameter_count(arch) == sum(x.numel() for x in before.values())
    shape = table["embedding.word_embeddings.weight"].shape
    assert shape[0] == (101 if tensor == 1 else 102)
    # A tied output layer is the embedding on disk.
    assert ("output_layer.weight" in table) != read_config(hf)["tie_word_embeddings"]


@pytest.mark.parametrize("family", FAMILIES)
def test_unfolded_again_a_model_is_what_it_was_to_one_rounding(family, tmp_path):
    hf = tiny_checkpoint(tmp_path / "model", family)
    before = tensors(hf)
    after = tensors(there_and_back(hf, tmp_path, scale=1.5, unfold=True))
    for name, value in before.items():
        assert ((after[name] - value).abs() <= 2**-22 * value.abs()).all(), name
    assert "qurl" not in read_config(tmp_path / "hf")


@pytest.mark.parametrize(
    "scale, dtype, folded",
    [
        (1.0, torch.bfloat16, torch.bfloat16),
        (1.5, torch.bfloat16, torch.float32),
        (2.0, torch.bfloat16, torch.bfloat16),
        (4.0, torch.float16, torch.float32),  # small numbers have few exponents left there
    ],
)
def test_formats_are_those_of_the_tensors_whatever_the_config_says(scale, dtype, folded, tmp_path):
    hf = tiny_checkpoint(tmp_path / "model", "llama")
    mixed = {"norm.weight": torch.float32, "o_proj.weight": torch.float16} if scale == 1.0 else {}
    before = {}
    for name, value in tensors(hf).items():
        form = next((form for end, form in mixed.items() if name.endswith(end)), dtype)
        before[name] = (value * 1e-3).to(form)
    save_file(before, hf / "model.safetensors")
    (hf / "config.json").write_text(json.dumps({**read_config(hf), "dtype": "float16"}))
    after = tensors(there_and_back(hf, tmp_path, scale=scale, unfold=True))
    table = TorchDistReader(tmp_path / "megatron").tensors
    stored = table["decoder.layers.mlp.linear_fc1.weight"].dtype
    assert stored == folded
    for name, value in before.items():
        assert after[name].dtype == value.dtype and torch.equal(after[name], value), name


@pytest.mark.parametrize("family", FAMILIES)
def test_without_unfolding_the_folded_model_is_written_and_says_so(family, tmp_path):
    hf = tiny_checkpoint(tmp_path / "model", family)
    config = read_config(hf)
    expected = fold_uaq(tensors(hf), config, 1.5)
    back = there_and_back(hf, tmp_path, scale=1.5)
    assert read_config(back)["qurl"] == {**config["qurl"], "dtype": "float32"}
    after = tensors(back)
    assert all(torch.equal(after[name], expected[name]) for name in expected)


@pytest.mark.crossed
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_codes_are_those_of_the_whole_fp32_weight_before_and_after_folding(
    family, scheme, tmp_path
):
    hf = tiny_checkpoint(tmp_path / "model", family)
    run(to_megatron(open_checkpoint(hf), tmp_path / "megatron", uaq_scale=1.5, tensor=2))
    for name, folder in (("plain", hf), ("folded", tmp_path / "megatron")):
        job = to_quantized(
            open_checkpoint(folder), tmp_path / name, scheme=scheme, file_bytes=SMALL
        )
        run(job)
    plain, folded = (tensors(tmp_path / name) for name in ("plain", "folded"))
    config = read_config(tmp_path / "folded")
    assert config["qurl"]["uaq_scale"] == 1.5
    # INT8 experts, which SGLang's own layout alone serves.
    int8_experts = family.endswith("_moe") and scheme == "int8"
    method = "w8a8_int8" if int8_experts else "compressed-tensors"
    assert config["quantization_config"]["quant_method"] == method
    for name, weight in tensors(hf).items():
        if "_proj" not in name or not name.endswith("weight"):
            assert plain[name].dtype == torch.float32
            continue
        whole = quantize(weight, scheme)
        assert torch.equal(plain[name].view(torch.uint8), whole.values.view(torch.uint8)), name
        assert torch.equal(plain[f"{name}_scale"], whole.scale)
        if scheme == "int8":  # dividing by 1.5 may move an FP8 code at a tie
            assert torch.equal(folded[name], whole.values), name
        fold = 1.0 if "o_proj" in name or "down_proj" in name else 1.5
        torch.testing.assert_close(folded[f"{name}_scale"] * fold, whole.scale)


def test_files_are_as_large_as_asked_and_listed_in_the_index(tmp_path):
    hf = tiny_checkpoint(tmp_path / "model", "qwen2")
    back = there_and_back(hf, tmp_path, scale=1.0)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    files = sorted(back.glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors" and len(files) > 5
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors(hf).values())
    largest = max(x.nbytes for x in tensors(hf).values())
    assert all(file.stat().st_size < max(SMALL, 2 * largest) + 2000 for file in files)


def test_a_job_that_fails_leaves_nothing_and_done_it_is_not_written_again(tmp_path):
    source = open_checkpoint(tiny_checkpoint(tmp_path / "model", "qwen2"))
    job = to_megatron(source, tmp_path / "out", file_bytes=SMALL)
    before = sorted(tmp_path.iterdir())

    def fail(path: Path) -> None:
        assert not (tmp_path / "out").exists() and path.parent.name.startswith(".out.")
        path.write_bytes(b"half of")
        raise ConfigError("stop")

    with pytest.raises(ConfigError, match="stop"):
        run(replace(job, files=[*job.files[:2], replace(job.files[2], write=fail)]))
    assert sorted(tmp_path.iterdir()) == before
    run(job)
    with pytest.raises(ConfigError, match="out exists already; remove it or name another"):
        run(job)
    assert all_damage(tmp_path / "out") == []


def test_a_difference_is_measured_and_named(tmp_path):
    hf = tiny_checkpoint(tmp_path / "a", "qwen2")
    changed = tensors(hf)
    name = "model.layers.1.mlp.up_proj.weight"
    norm = changed[name].double().norm().item()
    changed[name][3, 5] += 0.25
    tiny_checkpoint(tmp_path / "b", "qwen2")
    save_file(changed, tmp_path / "b" / "model.safetensors")
    a, b = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    found = {d.name: d for d in differences(a, b)}
    assert found.keys() == changed.keys()
    assert [d.name for d in found.values() if d.beyond(0.0)] == [name]
    assert found[name].max_abs == pytest.approx(0.25, rel=1e-6)
    assert found[name].relative == pytest.approx(0.25 / norm, rel=1e-6)
    assert found[name].beyond(0.2 / norm) and not found[name].beyond(0.3 / norm)

    changed[name][0, 0] = torch.nan
    save_file(changed, tmp_path / "b" / "model.safetensors")
    found = {d.name: d for d in differences(a, open_checkpoint(tmp_path / "b"))}
    assert found[name].beyond(1e9)


def test_kinds_are_compared_by_what_the_model_computes_with(tmp_path):
    hf = tiny_checkpoint(tmp_path / "hf", "qwen2")
    source = open_checkpoint(hf)
    run(to_megatron(source, tmp_path / "megatron", uaq_scale=2.0))
    for scale in (1.0, 2.0):
        out = tmp_path / f"q{scale}"
        run(to_quantized(source, out, scheme="int8", uaq_scale=scale))
    plain, megatron, quantized, folded = (
        open_checkpoint(tmp_path / name, quantized=True)
        for name in ("hf", "megatron", "q1.0", "q2.0")
    )
    assert not any(d.beyond(0.0) for d in differences(plain, megatron))
    between = list(differences(quantized, folded))
    assert {d.flips for d in between} == {None, 0.0} and not any(d.beyond(0.0) for d in between)
    rounded = [d for d in differences(megatron, quantized) if d.relative]
    assert len(rounded) == 4 * 7 and all(0.001 < d.relative < 0.02 for d in rounded)


def test_missing_and_left_over_tensors_are_named(tmp_path):
    for name in ("a", "b"):
        tiny_checkpoint(tmp_path / name, "qwen2")
    changed = tensors(tmp_path / "a")
    changed["model.norm.bias"] = changed.pop("model.norm.weight")
    changed["lm_head.weight"] = changed["lm_head.weight"][:100].clone()
    save_file(changed, tmp_path / "b" / "model.safetensors")
    found = {
        d.name: d
        for d in differences(open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b"))
        if d.beyond(1e9)
    }
    assert found["model.norm.weight"].only_in == "A" and found["model.norm.bias"].only_in == "B"
    assert found["lm_head.weight"].shapes == ((128, 64), (100, 64)) and len(found) == 3


def test_checkpoints_have_commands_of_qurl(tmp_path, capsys):
    model = tiny_checkpoint(tmp_path / "model", "qwen2")
    folded, exported, codes = (tmp_path / name for name in ("folded", "exported", "codes"))
    assert tool("convert", "--hf", model, "--out", folded, "--uaq-scale", 1.5) == 0
    assert tool("export", "--ckpt", folded, "--out", exported, "--unfold-uaq") == 0
    assert tool("quantize", "--model", folded, "--scheme", "int8", "--out", codes) == 0
    capsys.readouterr()
    assert tool("diff", model, exported, "--tol", 1e-6) == 0
    assert " 0 differ beyond 1e-06" in capsys.readouterr().out
    assert tool("diff", model, codes) == 1
    capsys.readouterr()
    kinds = {
        model: ("Hugging Face, safetensors", "none"),
        folded: ("Megatron, torch_dist", "s = 1.5 folded in"),
        codes: ("Hugging Face, quantized: int8", "s = 1.5 folded in"),
    }
    for folder, (kind, uaq) in kinds.items():
        assert tool("inspect", folder) == 0
        first, *lines = capsys.readouterr().out.splitlines()
        facts = dict(line.split(maxsplit=1) for line in lines)
        assert (first, facts["kind"], facts["UAQ"]) == (str(folder), kind, uaq)
        assert facts["model"].startswith("qwen2: 4 layers, hidden 64, 4 heads over 2 of keys, voc")
        assert facts["parameters"] == "140,352", facts
        assert folder != folded or facts["weights"] == "float32 (10 tensors)"
    assert tool("inspect", folded, "--verify") == 0
    message = capsys.readouterr().out
    assert "s = 1.5 folded in" in message and "every file is what was written" in message
    flip(folded / "__0_0.distcp")
    (folded / "common.pt").unlink()
    assert tool("inspect", folded, "--verify") == 1
    *_, changed, missing = capsys.readouterr().out.splitlines()
    assert changed.startswith(f"{folded / '__0_0.distcp'} has changed since it was written")
    assert missing == f"{folded / 'common.pt'} is missing"
