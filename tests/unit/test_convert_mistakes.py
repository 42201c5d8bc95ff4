"""What users get wrong: one sentence that names it, exit code 2, and nothing half-written."""

import importlib
import json
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qurl_megatron.checkpoints.job import partial_folder
from qurl_megatron.checkpoints.torch_dist import Chunk, TorchDistReader, write_chunks, write_table
from qurl_megatron.tensors.slice import Slice
from tests.support.models import tiny_checkpoint
from tests.support.tools import tool

TOOLS = Path(__file__).parents[2] / "checkpoints_tools"


@pytest.fixture
def hf(tmp_path) -> Path:
    return tiny_checkpoint(tmp_path / "model", "qwen2")


@pytest.fixture
def refused(tmp_path, capsys):
    """Run a tool, check that it refuses in one sentence and leaves nothing; the sentence."""

    def refuse(name: str, *arguments: object) -> str:
        out = tmp_path / "out"
        capsys.readouterr()  # what making the model message
        assert tool(name, *arguments, "--out", out) == 2
        assert not out.exists()
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and "Traceback" not in message
        return message

    return refuse


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.fixture
def megatron(hf, tmp_path) -> Path:
    folder = tmp_path / "megatron"
    assert tool("hf_to_megatron", "--hf", hf, "--out", folder) == 0
    return folder


DOWN = "model.layers.3.mlp.down_proj.weight"
GATE_BIAS = "model.layers.0.mlp.gate_proj.bias"
K_BIAS = "model.layers.2.self_attn.k_proj.bias"
EMBEDDING = "model.embed_tokens.weight"
TENSORS = {
    "missing": (lambda t: t.pop(K_BIAS), f"tensor {K_BIAS} is not in"),
    "lost": (lambda t: t.update({GATE_BIAS: torch.ones(96)}), f"{GATE_BIAS} in .* not part of"),
    "nan": (lambda t: t[DOWN][5].fill_(torch.nan), f"tensor {DOWN} in .* has inf or nan"),
    "inf": (lambda t: t[DOWN][5].fill_(torch.inf), f"tensor {DOWN} in .* has inf or nan"),
}


@pytest.mark.parametrize("case", TENSORS)
@pytest.mark.parametrize("name", ["hf_to_megatron", "quantize"])
def test_a_tensor_that_is_wrong_is_named(name, case, hf, refused):
    change, message = TENSORS[case]
    rewrite(hf, change)
    source = ("--hf", hf) if name == "hf_to_megatron" else ("--model", hf, "--scheme", "fp8")
    assert re.search(message, refused(name, *source))


def test_a_safetensors_file_that_is_cut_off(hf, refused, tmp_path):
    file = hf / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    message = refused("hf_to_megatron", "--hf", hf)
    assert "model.safetensors cannot be read" in message and "copy it again" in message
    assert not partial_folder(tmp_path / "out").exists()


def test_a_note_of_git_lfs_in_place_of_the_weights(hf, refused):
    note = "version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 988097824\n"
    (hf / "model.safetensors").write_text(note)
    assert f"run `git lfs pull` in {hf}" in refused("hf_to_megatron", "--hf", hf)


def test_folding_twice(hf, refused, tmp_path):
    once = tmp_path / "once"
    assert tool("hf_to_megatron", "--hf", hf, "--out", once, "--uaq-scale", 1.5) == 0
    message = refused("quantize", "--model", once, "--scheme", "int8", "--uaq-scale", 1.5)
    assert "already has the UAQ factor 1.5 folded in" in message
    assert tool("megatron_to_hf", "--ckpt", once, "--out", tmp_path / "folded") == 0
    message = refused("hf_to_megatron", "--hf", tmp_path / "folded", "--uaq-scale", 2)
    assert "cannot be folded again by 2.0" in message


def test_a_disk_with_too_little_room(hf, refused, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 1000, 1000))
    message = refused("hf_to_megatron", "--hf", hf)
    assert re.search(r"has 1.00 kB free, out needs \d+\.\d\d kB more; free some", message)


def test_a_disk_that_fills_up_on_the_way_and_has_room_again_later(hf, refused, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        message = refused("hf_to_megatron", "--hf", hf, "--file-gb", 1e-4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "out.partial cannot be written" in message and "set --out to" in message
    out = tmp_path / "out"
    assert tool("hf_to_megatron", "--hf", hf, "--file-gb", 1e-4, "--out", out) == 0
    assert tool("inspect", out, "--verify") == 0


@pytest.mark.parametrize("out", ["/proc/out", "file/out"])
def test_an_output_nobody_can_write(out, hf, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert tool("hf_to_megatron", "--hf", hf, "--out", tmp_path / out) == 2
    assert re.search("cannot be written .*set --out to another folder", capsys.readouterr().err)


def test_a_pickle_checkpoint_is_not_loaded(hf, refused):
    (hf / "model.safetensors").unlink()
    torch.save({}, hf / "pytorch_model.bin")
    message = refused("hf_to_megatron", "--hf", hf)
    assert "pickle files (pytorch_model.bin) are never loaded" in message


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_code_in_a_megatron_checkpoint_is_not_run(megatron, refused, tmp_path):
    gone_off = tmp_path / "gone_off"
    (megatron / ".metadata").write_bytes(pickle.dumps(Bomb(gone_off)))
    message = refused("megatron_to_hf", "--ckpt", megatron)
    assert "is not the table of contents of a torch_dist checkpoint" in message
    assert not gone_off.exists()


def test_a_table_of_contents_changes_no_class(megatron, refused):
    """Pickle sets attributes on what a name stands for; here it stands for nothing shared."""
    for module, name in (
        ("pathlib", "Path"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch", "Size"),
    ):
        attack = (
            b"\x80\x04"
            + b"".join(b"\x8c" + bytes([len(x)]) + x.encode() for x in (module, name))
            + b"\x93N}\x8c\x05taint\x88s\x86b."  # STACK_GLOBAL, BUILD (None, {"taint": True})
        )
        (megatron / ".metadata").write_bytes(attack)
        assert "is not the table of contents" in refused("megatron_to_hf", "--ckpt", megatron)
        assert not hasattr(getattr(importlib.import_module(module), name), "taint")


def test_a_damaged_table_of_contents(megatron, refused, tmp_path):
    table = (megatron / ".metadata").read_bytes()
    for position in range(20, len(table), len(table) // 40):
        (megatron / ".metadata").write_bytes(
            table[:position] + bytes([table[position] ^ 0x55]) + table[position + 1 :]
        )
        out = tmp_path / "flipped"
        assert tool("megatron_to_hf", "--ckpt", megatron, "--out", out, "--restart") in (0, 2)
        shutil.rmtree(out, ignore_errors=True)
    (megatron / ".metadata").write_bytes(table)
    (megatron / "metadata.json").write_text("[]")
    assert "must hold a JSON object" in refused("megatron_to_hf", "--ckpt", megatron)


def test_chunks_with_a_hole_between_them(megatron, refused):
    """The first half twice and the second not at all are as many elements as the whole."""
    table = TorchDistReader(megatron)
    rows: dict[str, list] = {}
    for key in table.keys():  # noqa: SIM118
        for chunk in table.chunks(key):
            offsets, sizes = chunk.part.starts, chunk.part.sizes
            row = {"key": key, "shape": table.shape(key), "offsets": offsets, "sizes": sizes}
            row |= {"dtype": "float32", "start": chunk.start, "length": chunk.length}
            if key != "output_layer.weight":
                rows.setdefault(chunk.file, []).append(row)
    halves = [
        Chunk("output_layer.weight", (128, 64), Slice((start, 0), (64, 64)), torch.float32)
        for start in (0, 32)
    ]
    half = torch.ones(64, 64)
    rows["__9_0.distcp"] = write_chunks(megatron / "__9_0.distcp", ((h, half) for h in halves))
    write_table(megatron, rows)
    message = refused("megatron_to_hf", "--ckpt", megatron)
    assert "tensor output_layer.weight" in message and "is not whole" in message


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_hidden_layers": 2}, "[4, 64] where config.json says [2, 64]"),
        ({"tie_word_embeddings": True}, "tensor output_layer.weight"),
        ({"model_type": "llama"}, "linear_qkv.bias"),
        ({"vocab_size": 200}, "[128, 64] where config.json says [200, 64]"),
        ({"qurl": {"uaq_scale": 0}}, "does not name a UAQ factor"),
        ({"qurl": None}, "does not name a UAQ factor"),
    ],
)
def test_a_config_of_another_model_beside_megatron_weights(megatron, change, message, hf, refused):
    configure(megatron / "hf", **change)
    assert message in refused("megatron_to_hf", "--ckpt", megatron)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_hidden_layers": 4.0}, "num_hidden_layers must be a positive whole number"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; known: llama, mistral"),
        ({"vocab_size": 130}, f"{EMBEDDING} in"),
    ],
)
def test_a_config_with_a_wrong_value(change, message, hf, refused):
    configure(hf, **change)
    assert message in refused("hf_to_megatron", "--hf", hf)


def test_an_index_that_does_not_fit_its_files(hf, refused):
    tensors = load_file(hf / "model.safetensors")
    (hf / "model.safetensors").unlink()
    save_file(tensors, hf / "a.safetensors")
    save_file({"model.norm.weight": torch.zeros(64)}, hf / "b.safetensors")
    index = hf / "model.safetensors.index.json"
    places = dict.fromkeys(tensors, "a.safetensors")
    index.write_text(json.dumps({"weight_map": places | {"model.norm.weight": "b.safetensors"}}))
    assert "tensor model.norm.weight is in" in refused("hf_to_megatron", "--hf", hf)
    (hf / "b.safetensors").unlink()
    index.write_text(json.dumps({"weight_map": places | {"model.extra": "a.safetensors"}}))
    assert "tensor model.extra, which it has not" in refused("hf_to_megatron", "--hf", hf)
    for broken in ({}, [], {"weight_map": {"x": "../a.safetensors"}}, {"weight_map": {"x": 5}}):
        index.write_text(json.dumps(broken))
        assert "index.json" in refused("hf_to_megatron", "--hf", hf)


def test_a_value_that_the_asked_format_cannot_hold(hf, refused):
    rewrite(hf, lambda t: t["model.layers.3.mlp.down_proj.weight"][5].fill_(1e6))
    message = refused("hf_to_megatron", "--hf", hf, "--dtype", "float16")
    assert "down_proj.weight has values that float16 cannot hold" in message


def test_a_megatron_file_that_is_cut_off(megatron, refused):
    file = megatron / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-3000])
    message = refused("megatron_to_hf", "--ckpt", megatron)
    assert "cannot be read from" in message and "the file is damaged" in message
    file.unlink()
    assert "names __0_0.distcp, which is not in" in refused("megatron_to_hf", "--ckpt", megatron)


def test_a_megatron_checkpoint_of_nobody_knows_what(megatron, hf, refused, tmp_path):
    shutil.rmtree(megatron / "hf")
    message = refused("megatron_to_hf", "--ckpt", megatron)
    assert "does not say what model it is" in message and "--hf" in message
    other = tiny_checkpoint(tmp_path / "other", "qwen2", intermediate_size=128)
    message = refused("megatron_to_hf", "--ckpt", megatron, "--hf", other)
    assert (
        "linear_fc1.weight" in message
        and "[4, 192, 64] where config.json says [4, 256, 64]" in message
    )
    assert tool("megatron_to_hf", "--ckpt", megatron, "--hf", hf, "--out", tmp_path / "back") == 0


def test_a_quantized_source(hf, refused, tmp_path):
    quantized = tmp_path / "quantized"
    assert tool("quantize", "--model", hf, "--scheme", "int8", "--out", quantized) == 0
    message = refused("quantize", "--model", quantized, "--scheme", "fp8")
    assert f"{quantized}/config.json: quantization_config means quantized weights" in message


def test_a_tied_output_layer_that_is_not(tmp_path, refused):
    hf = tiny_checkpoint(tmp_path / "tied", "llama")
    rewrite(hf, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    message = refused("hf_to_megatron", "--hf", hf)
    assert "lm_head.weight" in message and "set it to false" in message


def test_folders_that_are_not_there(refused, tmp_path):
    assert "is not a folder" in refused("hf_to_megatron", "--hf", tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "config.json is missing" in refused("hf_to_megatron", "--hf", tmp_path / "empty")


def test_a_layout_no_engine_loads(hf, refused):
    message = refused("quantize", "--model", hf, "--scheme", "int8", "--format", "modelopt")
    assert "use format compressed-tensors or sglang" in message


@pytest.mark.parametrize(
    "option, message",
    [
        (("--uaq-scale", "inf"), "the UAQ factor must lie between 1.0 and 1000, got inf"),
        (("--uaq-scale", 0.5), "the UAQ factor must lie between 1.0 and 1000, got 0.5"),
        (("--tensor", 0), "--tensor must be 1 or more, got 0"),
        (("--tensor", 4), "does not divide the model's num_key_value_heads=2; use one of [1, 2]"),
        (("--pipeline", 3), "--pipeline=3 does not divide the model's num_hidden_layers=4"),
        (("--file-gb", 0), "--file-gb must be positive, got 0.0"),
    ],
)
def test_numbers_that_make_no_sense(option, message, hf, refused):
    assert message in refused("hf_to_megatron", "--hf", hf, *option)


# -- the tools themselves ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["hf_to_megatron", "megatron_to_hf", "quantize", "inspect", "diff"]
)
def test_a_tool_runs_as_a_script_and_explains_itself(name):
    done = subprocess.run(
        [sys.executable, TOOLS / f"{name}.py", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "example:" in done.stdout, done.stderr


def test_a_mistake_in_a_tools_options_is_one_sentence(capsys, monkeypatch):
    for line, message in (
        ("diff a b c", "diff.py: unexpected: c; `diff.py --help` says what it takes\n"),
        ("inspect a --verfy", "inspect.py: there is no option --verfy; did you mean --verify?\n"),
    ):
        name, *words = line.split()
        monkeypatch.setattr(sys, "argv", [f"{name}.py"])
        with pytest.raises(SystemExit) as left:
            tool(name, *words)
        assert (left.value.code, capsys.readouterr().err) == (2, message)


def test_a_dry_run_writes_nothing(hf, tmp_path, capsys):
    before = sorted(tmp_path.rglob("*"))
    arguments = ("--hf", hf, "--out", tmp_path / "deep" / "out", "--dry-run", "--tensor", 2)
    assert tool("hf_to_megatron", *arguments) == 0
    message = capsys.readouterr().out
    assert "would write" in message and "__0_0.distcp" in message and "free on that disk" in message
    assert sorted(tmp_path.rglob("*")) == before


def test_inspect_knows_all_three_kinds(hf, tmp_path, capsys):
    megatron, quantized = tmp_path / "megatron", tmp_path / "quantized"
    arguments = ("--hf", hf, "--out", megatron, "--uaq-scale", 1.5, "--tensor", 2)
    assert tool("hf_to_megatron", *arguments) == 0
    assert tool("quantize", "--model", megatron, "--scheme", "int8", "--out", quantized) == 0
    facts = {}
    for folder in (hf, megatron, quantized):
        capsys.readouterr()
        assert tool("inspect", folder, "--json") == 0
        facts[folder] = json.loads(capsys.readouterr().out)
    assert [f["kind"] for f in facts.values()] == ["huggingface", "megatron", "quantized"]
    assert [f["uaq_scale"] for f in facts.values()] == [1.0, 1.5, 1.5]
    assert len({f["parameters"] for f in facts.values()}) == 1
    assert facts[megatron]["layout"] == {"tensor": 2, "padded_vocab": 128}
    assert facts[megatron]["weights"] == {"float32": 10}
    assert (facts[quantized]["scheme"], facts[quantized]["format"]) == (
        "int8",
        "compressed-tensors",
    )
    assert tool("inspect", megatron, "--verify", "--tensors") == 0
    message = capsys.readouterr().out
    assert "s = 1.5 folded in" in message and "decoder.layers.mlp.linear_fc1.weight" in message
    assert "every file is what was written" in message
