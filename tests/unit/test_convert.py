"""Conversions lose nothing: there and back, killed and continued, alone and shared."""

import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qurl_megatron import cli
from qurl_megatron.checkpoints import HfReader, fold_uaq, open_checkpoint
from qurl_megatron.checkpoints.diff import differences
from qurl_megatron.checkpoints.inspect import open_any
from qurl_megatron.checkpoints.job import (
    MANIFEST,
    ConversionJob,
    partial_folder,
    read_manifest,
    run,
    verify,
)
from qurl_megatron.checkpoints.ops import hf_shapes, parameter_count
from qurl_megatron.checkpoints.to_huggingface import to_huggingface, to_quantized
from qurl_megatron.checkpoints.to_megatron import to_megatron
from qurl_megatron.checkpoints.torch_dist import TorchDistReader
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.quant import quantize
from qurl_megatron.tensors.arch import read_config
from tests.support.models import FAMILIES, tiny_checkpoint

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
SMALL = 20_000  # bytes to a file, so that even a tiny model has many


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    reader = HfReader(folder)
    return {name: reader.whole(name).clone() for name in reader.names()}


def there_and_back(hf: Path, out: Path, *, scale: float, tensor=2, pipeline=2, **back) -> Path:
    source = open_checkpoint(hf)
    job = to_megatron(
        source,
        out / "megatron",
        uaq_scale=scale,
        tensor=tensor,
        pipeline=pipeline,
        file_bytes=SMALL,
    )
    assert run(job)
    assert run(
        to_huggingface(open_checkpoint(out / "megatron"), out / "hf", file_bytes=SMALL, **back)
    )
    return out / "hf"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tensor, pipeline", LAYOUTS)
def test_a_round_trip_is_exact(family, tensor, pipeline, tmp_path):
    hf = tiny_checkpoint(tmp_path / "model", family, vocab_size=101)
    back = there_and_back(hf, tmp_path, scale=1.0, tensor=tensor, pipeline=pipeline)
    before, after = tensors(hf), tensors(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert read_config(back) == read_config(hf)


@pytest.mark.parametrize("family", FAMILIES)
def test_unfolded_again_a_model_is_what_it_was_to_one_rounding(family, tmp_path):
    hf = tiny_checkpoint(tmp_path / "model", family)
    before = tensors(hf)
    after = tensors(there_and_back(hf, tmp_path, scale=1.5, unfold=True))
    for name, value in before.items():
        # Zero-centred norms add one before they are scaled: the rounding is of 1 + g.
        size = (1 + value).abs() if read_config(hf)["model_type"] == "gemma" else value.abs()
        assert ((after[name] - value).abs() <= 2**-22 * size).all(), name
    assert "qurl" not in read_config(tmp_path / "hf")


def test_a_bf16_model_comes_back_exactly_even_folded_and_unfolded(tmp_path):
    hf = tiny_checkpoint(tmp_path / "model", "qwen2")
    rounded = {name: x.bfloat16() for name, x in tensors(hf).items()}
    save_file(rounded, hf / "model.safetensors")
    (hf / "config.json").write_text(json.dumps({**read_config(hf), "dtype": "bfloat16"}))
    back = there_and_back(hf, tmp_path, scale=1.5, unfold=True)
    assert TorchDistReader(tmp_path / "megatron").dtype("output_layer.weight") == torch.float32
    before, after = tensors(hf), tensors(back)
    assert all(torch.equal(before[name], after[name]) for name in before)


def store(hf: Path, dtypes: dict[str, torch.dtype], default: torch.dtype) -> dict:
    """Rewrite a model in other number formats, by endings of names; its tensors."""
    found = {
        name: x.to(next((d for end, d in dtypes.items() if name.endswith(end)), default))
        for name, x in tensors(hf).items()
    }
    save_file(found, hf / "model.safetensors")
    return found


@pytest.mark.parametrize("scale", [1.0, 1.5, 2.0])
def test_formats_are_those_of_the_tensors_whatever_the_config_says(scale, tmp_path):
    hf = tiny_checkpoint(tmp_path / "model", "llama")
    formats = {"norm.weight": torch.float32, "o_proj.weight": torch.float16}
    before = store(hf, formats if scale == 1.0 else {}, torch.bfloat16)
    (hf / "config.json").write_text(json.dumps({**read_config(hf), "dtype": "float16"}))
    after = tensors(there_and_back(hf, tmp_path, scale=scale, unfold=True))
    for name, value in before.items():
        assert after[name].dtype == value.dtype and torch.equal(after[name], value), name


@pytest.mark.parametrize("family, dtype", [("gemma", "bfloat16"), ("llama", "float16")])
def test_a_power_of_two_does_not_fold_exactly_into_everything(family, dtype, tmp_path):
    hf = tiny_checkpoint(tmp_path / "model", family)
    small = {name: x * 1e-3 for name, x in tensors(hf).items()}  # FP16 has few exponents there
    save_file(small, hf / "model.safetensors")
    before = store(hf, {}, getattr(torch, dtype))
    after = tensors(there_and_back(hf, tmp_path, scale=4.0, unfold=True))
    for name, value in before.items():
        error = (after[name].double() - value.double()).abs()
        # (1 + g) in FP32 keeps g to 6e-8, to which the format adds its own rounding.
        near = 1e-7 + 2**-8 * value.double().abs()
        assert (error <= (near if "norm" in name and family == "gemma" else 0.0)).all(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_without_unfolding_the_folded_model_is_written_and_says_so(family, tmp_path):
    hf = tiny_checkpoint(tmp_path / "model", family)
    config = read_config(hf)
    expected = fold_uaq(tensors(hf), config, 1.5)
    back = there_and_back(hf, tmp_path, scale=1.5)
    assert read_config(back)["qurl"] == {**config["qurl"], "dtype": "float32"}
    after = tensors(back)
    assert all(torch.equal(after[name], expected[name]) for name in expected)


def test_the_shapes_follow_from_the_config(tmp_path):
    for family in FAMILIES:
        hf = tiny_checkpoint(tmp_path / family, family, vocab_size=101)
        shapes = {name: tuple(x.shape) for name, x in tensors(hf).items()}
        arch = open_checkpoint(hf).arch
        assert hf_shapes(arch) == shapes
        assert parameter_count(arch) == sum(x.numel() for x in tensors(hf).values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_codes_are_those_of_the_whole_fp32_weight_before_and_after_folding(
    family, scheme, tmp_path
):
    hf = tiny_checkpoint(tmp_path / "model", family)
    run(to_megatron(open_checkpoint(hf), tmp_path / "megatron", uaq_scale=1.5, tensor=2))
    for name, folder in (("plain", hf), ("folded", tmp_path / "megatron")):
        job = to_quantized(
            open_checkpoint(folder),
            tmp_path / name,
            scheme=scheme,
            fmt="compressed-tensors",
            file_bytes=SMALL,
        )
        run(job)
    plain, folded = (tensors(tmp_path / name) for name in ("plain", "folded"))
    config = read_config(tmp_path / "folded")
    assert config["qurl"]["uaq_scale"] == 1.5
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
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


def test_extra_keys_of_other_writers_and_padding_do_not_reach_hugging_face(tmp_path):
    hf = tiny_checkpoint(tmp_path / "model", "llama", vocab_size=101)
    run(to_megatron(open_checkpoint(hf), tmp_path / "megatron", tensor=2))
    table = TorchDistReader(tmp_path / "megatron")
    assert table.shape("embedding.word_embeddings.weight") == (102, 64)
    assert "output_layer.weight" not in table  # tied: on disk it is the embedding
    run(to_huggingface(open_checkpoint(tmp_path / "megatron"), tmp_path / "back"))
    assert tensors(tmp_path / "back")["model.embed_tokens.weight"].shape == (101, 64)


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


# -- jobs ----------------------------------------------------------------------------------------


JOBS = {
    "to Megatron": lambda hf, mg, out: to_megatron(
        open_checkpoint(hf), out, uaq_scale=1.5, tensor=2, file_bytes=SMALL
    ),
    "to Hugging Face": lambda hf, mg, out: to_huggingface(
        open_checkpoint(mg), out, unfold=True, file_bytes=SMALL
    ),
    "quantized": lambda hf, mg, out: to_quantized(
        open_checkpoint(mg), out, scheme="int8", fmt="sglang", file_bytes=SMALL
    ),
}


def run_until_killed(kind: str, hf: Path, megatron: Path, out: Path) -> None:
    """Run a job in this process, which dies by SIGKILL while it writes the fifth file."""

    def die(path: Path) -> None:
        path.write_bytes(b"half of")
        os.kill(os.getpid(), signal.SIGKILL)

    job = JOBS[kind](hf, megatron, out)
    files = list(job.files)
    files[4] = replace(files[4], write=die)
    run(replace(job, files=files))


@pytest.mark.parametrize("kind", JOBS)
def test_a_killed_job_goes_on_where_it_stopped_and_ends_in_the_same_bytes(kind, tmp_path):
    hf = tiny_checkpoint(tmp_path / "model", "qwen2")
    run(to_megatron(open_checkpoint(hf), tmp_path / "megatron"))
    out = tmp_path / "out"
    child = multiprocessing.get_context("forkserver").Process(
        target=run_until_killed, args=(kind, hf, tmp_path / "megatron", out)
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL

    aside = partial_folder(out)
    assert not out.exists()
    done = {
        path.stem: (aside / "data" / path.stem).stat()
        for path in (aside / "records").glob("*.json")
    }
    assert 1 <= len(done) <= 4
    job = JOBS[kind](hf, tmp_path / "megatron", out)
    assert run(job)
    assert not aside.exists()
    for name, before in done.items():  # not written again
        assert (out / name).stat().st_mtime_ns == before.st_mtime_ns

    run(JOBS[kind](hf, tmp_path / "megatron", tmp_path / "uninterrupted"))
    assert read_manifest(out)["files"] == read_manifest(tmp_path / "uninterrupted")["files"]
    assert len(read_manifest(out)["files"]) > 8 and verify(out) == []


def test_done_twice_a_job_does_nothing_and_another_one_is_refused(tmp_path):
    source = open_checkpoint(tiny_checkpoint(tmp_path / "model", "qwen2"))
    assert run(to_megatron(source, tmp_path / "out"))
    before = (tmp_path / "out" / MANIFEST).stat().st_mtime_ns
    assert not run(to_megatron(source, tmp_path / "out"))
    assert (tmp_path / "out" / MANIFEST).stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="exists already; remove it or name another --out"):
        run(to_megatron(source, tmp_path / "out", tensor=2))


def test_what_another_job_left_is_not_continued(tmp_path):
    source = open_checkpoint(tiny_checkpoint(tmp_path / "model", "qwen2"))
    job = to_megatron(source, tmp_path / "out", file_bytes=SMALL)

    def fail(path: Path) -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        run(replace(job, files=[*job.files[:2], replace(job.files[2], write=fail)]))
    other = to_megatron(source, tmp_path / "out", uaq_scale=2.0, file_bytes=SMALL)
    with pytest.raises(ConfigError, match="unfinished job with another uaq_scale; give --restart"):
        run(other)
    assert run(other, restart=True)
    assert read_manifest(tmp_path / "out")["request"]["uaq_scale"] == 2.0


def test_a_changed_file_is_found(tmp_path):
    source = open_checkpoint(tiny_checkpoint(tmp_path / "model", "qwen2"))
    run(to_megatron(source, tmp_path / "out", file_bytes=SMALL))
    assert verify(tmp_path / "out") == []
    victim = tmp_path / "out" / "__0_1.distcp"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert verify(tmp_path / "out") == [
        "__0_1.distcp has changed: its SHA-256 is not the one of the manifest"
    ]
    victim.write_bytes(content[:-1])
    (tmp_path / "out" / "common.pt").unlink()
    wrong = verify(tmp_path / "out")
    assert any("__0_1.distcp has" in line for line in wrong) and "common.pt is missing" in wrong


def stopped(job: ConversionJob) -> None:
    """Run a job that comes to an end in its last step, with all large files written."""

    def stop(folder: Path, kept: dict) -> None:
        (folder / "stray").write_text("half of a small file")
        raise ConfigError("stop")

    with pytest.raises(ConfigError, match="stop"):
        run(replace(job, finish=stop))


def test_stopped_in_its_last_step_a_job_only_repeats_that(tmp_path):
    source = open_checkpoint(tiny_checkpoint(tmp_path / "model", "qwen2"))
    job = to_megatron(source, tmp_path / "out", file_bytes=SMALL)
    stopped(job)
    never = [replace(file, write=lambda path: 1 / 0) for file in job.files]
    assert run(replace(job, files=never))
    assert verify(tmp_path / "out") == [] and not (tmp_path / "out" / "stray").exists()


@pytest.mark.parametrize("damage", ["gone", "cut off", "record cut off", "job.json cut off"])
def test_what_a_crash_damaged_is_written_again(damage, tmp_path):
    source = open_checkpoint(tiny_checkpoint(tmp_path / "model", "qwen2"))
    job = to_megatron(source, tmp_path / "out", file_bytes=SMALL)
    stopped(job)
    aside = partial_folder(tmp_path / "out")
    victim = {
        "gone": aside / "data" / "__0_1.distcp",
        "cut off": aside / "data" / "__0_1.distcp",
        "record cut off": aside / "records" / "__0_1.distcp.json",
        "job.json cut off": aside / "job.json",
    }[damage]
    victim.unlink() if damage == "gone" else victim.write_bytes(victim.read_bytes()[:10])
    if damage == "job.json cut off":
        with pytest.raises(ConfigError, match="job.json is not valid JSON"):
            run(job)
    assert run(job, restart=damage == "job.json cut off")
    run(to_megatron(source, tmp_path / "plain", file_bytes=SMALL))
    assert read_manifest(tmp_path / "out")["files"] == read_manifest(tmp_path / "plain")["files"]


def test_a_finished_folder_that_lost_a_file_is_not_called_done(tmp_path):
    source = open_checkpoint(tiny_checkpoint(tmp_path / "model", "qwen2"))
    job = to_megatron(source, tmp_path / "out", file_bytes=SMALL)
    run(job)
    (tmp_path / "out" / "__0_1.distcp").unlink()
    with pytest.raises(ConfigError, match="is damaged .__0_1.distcp is missing"):
        run(job)


def test_a_second_job_in_the_same_folder_is_refused(tmp_path):
    source = open_checkpoint(tiny_checkpoint(tmp_path / "model", "qwen2"))
    job = to_megatron(source, tmp_path / "out", file_bytes=SMALL)

    def intrude(path: Path) -> list:
        with pytest.raises(ConfigError, match="another job is writing"):
            run(job)
        return job.files[0].write(path)

    assert run(replace(job, files=[replace(job.files[0], write=intrude), *job.files[1:]]))


# -- comparing -----------------------------------------------------------------------------------


def test_a_difference_is_measured_and_named(tmp_path):
    hf = tiny_checkpoint(tmp_path / "a", "qwen2")
    changed = tensors(hf)
    name = "model.layers.1.mlp.up_proj.weight"
    norm = changed[name].double().norm().item()
    changed[name][3, 5] += 0.25
    tiny_checkpoint(tmp_path / "b", "qwen2")
    save_file(changed, tmp_path / "b" / "model.safetensors")
    a, b = open_any(tmp_path / "a"), open_any(tmp_path / "b")
    found = {d.name: d for d in differences(a, b)}
    assert found.keys() == changed.keys()
    assert [d.name for d in found.values() if d.beyond(0.0)] == [name]
    assert found[name].max_abs == pytest.approx(0.25, rel=1e-6)
    assert found[name].relative == pytest.approx(0.25 / norm, rel=1e-6)
    assert found[name].beyond(0.2 / norm) and not found[name].beyond(0.3 / norm)

    changed[name][0, 0] = torch.nan
    save_file(changed, tmp_path / "b" / "model.safetensors")
    found = {d.name: d for d in differences(a, open_any(tmp_path / "b"))}
    assert found[name].beyond(1e9)


def test_kinds_are_compared_by_what_the_model_computes_with(tmp_path):
    hf = tiny_checkpoint(tmp_path / "hf", "qwen2")
    source = open_checkpoint(hf)
    run(to_megatron(source, tmp_path / "megatron", uaq_scale=2.0))
    for scale in (1.0, 2.0):
        run(
            to_quantized(
                source, tmp_path / f"q{scale}", scheme="int8", fmt="sglang", uaq_scale=scale
            )
        )
    plain, megatron, quantized, folded = (
        open_any(tmp_path / name) for name in ("hf", "megatron", "q1.0", "q2.0")
    )
    assert not any(d.beyond(0.0) for d in differences(plain, megatron))
    assert any(d.beyond(0.4) for d in differences(plain, megatron, as_stored=True))
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
        for d in differences(open_any(tmp_path / "a"), open_any(tmp_path / "b"))
        if d.beyond(1e9)
    }
    assert found["model.norm.weight"].only_in == "A" and found["model.norm.bias"].only_in == "B"
    assert found["lm_head.weight"].shapes == ((128, 64), (100, 64)) and len(found) == 3


def test_checkpoints_have_commands_of_qurl(tmp_path, capsys):
    def qurl(*words: object) -> int:
        return cli.main([str(word) for word in words])

    model = tiny_checkpoint(tmp_path / "model", "qwen2")
    folded, exported, codes = (tmp_path / name for name in ("folded", "exported", "codes"))
    assert qurl("convert", "--hf", model, "--out", folded, "--uaq-scale", 1.5) == 0
    assert qurl("export", "--ckpt", folded, "--out", exported, "--unfold-uaq") == 0
    assert qurl("quantize", "--model", folded, "--scheme", "int8", "--out", codes) == 0
    capsys.readouterr()
    assert qurl("diff", model, exported, "--tol", 1e-6) == 0
    assert " 0 differ beyond 1e-06" in capsys.readouterr().out
    assert qurl("diff", model, codes) == 1
    assert qurl("inspect", codes, "--verify") == 0
    assert "every file is what was written" in capsys.readouterr().out
    assert qurl("inspect", tmp_path / "nothing") == 2
    error = capsys.readouterr().err
    assert error.startswith("qurl: ") and "nothing" in error and error.count("\n") == 1
