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
        assert not [path.name for path in tmp_path.iterdir() if "out" in path.name]
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and "Traceback" not in message
        return message

    return refuse


@pytest.fixture
def megatron(hf, tmp_path) -> Path:
    folder = tmp_path / "megatron"
    assert tool("convert", "--hf", hf, "--out", folder) == 0
    return folder


def tensors(change):
    """Return a function that changes the tensors of a Hugging Face folder."""

    def apply(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def config(**changes):
    """Return a function that changes keys of a folder's config.json."""

    def apply(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(found | changes))

    return apply


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def note_of_git_lfs(folder: Path) -> None:
    note = "version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 988097824\n"
    (folder / "model.safetensors").write_text(note)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def index(places, *, twice: str = ""):
    """Return a function that gives a folder an index of its tensors.

    Args:
        places: changes the index, a dict from tensors to a.safetensors.
        twice: a tensor that is in b.safetensors, too.
    """

    def apply(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        found = dict.fromkeys(load_file(folder / "a.safetensors"), "a.safetensors")
        if twice:
            save_file({twice: torch.zeros(64)}, folder / "b.safetensors")
        content = {"weight_map": {**found, **places}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return apply


DOWN, NORM = "model.layers.3.mlp.down_proj.weight", "model.norm.weight"
GATE_BIAS = "model.layers.0.mlp.gate_proj.bias"
K_BIAS = "model.layers.2.self_attn.k_proj.bias"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

MISTAKES = {
    "missing": (tensors(lambda t: t.pop(K_BIAS)), f"tensor {K_BIAS} is not in"),
    "extra": (tensors(lambda t: t.update({GATE_BIAS: torch.ones(96)})), f"{GATE_BIAS} .* not part"),
    "nan": (tensors(lambda t: t[DOWN][5].fill_(torch.nan)), f"tensor {DOWN} in .* has inf or nan"),
    "not tied": (config(tie_word_embeddings=True), f"{HEAD} in .* is not .*set it to false"),
    "another vocabulary": (config(vocab_size=130), f"{EMBEDDING} in .* says .130, 64"),
    "another family": (config(model_type="mamba"), "model_type 'mamba' is not supported"),
    "cut off": (cut_off, "model.safetensors cannot be read .*copy it again"),
    "a note": (note_of_git_lfs, "run `git lfs pull` in "),
    "pickles": (pickled, r"pickle files .pytorch_model.bin. are never loaded"),
    "twice": (index({NORM: "b.safetensors"}, twice=NORM), f"tensor {NORM} is in"),
    "not beside": (index({"x": "../a.safetensors"}), "index.json has no weight_map"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "no folder": (shutil.rmtree, "is not a folder"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_hugging_face_folder_that_is_wrong_is_named(case, hf, refused):
    change, message = MISTAKES[case]
    change(hf)
    assert re.search(message, refused("convert", "--hf", hf))


@pytest.mark.parametrize(
    "option, message",
    [
        (("--uaq-scale", "inf"), "the UAQ factor must lie between 1.0 and 1000, got inf"),
        (("--uaq-scale", 0.5), "the UAQ factor must lie between 1.0 and 1000, got 0.5"),
        (("--tensor", 0), "--tensor must be 1 or more, got 0"),
        (("--tensor", 4), "does not divide the model's num_key_value_heads=2; use one of [1, 2]"),
        (("--dtype", "float16"), "down_proj.weight has values that float16 cannot hold"),
    ],
)
def test_options_that_make_no_sense(option, message, hf, refused):
    tensors(lambda t: t[DOWN][5].fill_(1e6))(hf)
    assert message in refused("convert", "--hf", hf, *option)


def test_folding_twice(hf, refused, tmp_path):
    once = tmp_path / "once"
    assert tool("convert", "--hf", hf, "--out", once, "--uaq-scale", 1.5) == 0
    message = refused("quantize", "--model", once, "--scheme", "int8", "--uaq-scale", 1.5)
    assert "already has the UAQ factor 1.5 folded in" in message
    assert tool("export", "--ckpt", once, "--out", tmp_path / "folded") == 0
    message = refused("convert", "--hf", tmp_path / "folded", "--uaq-scale", 2)
    assert "cannot be folded again by 2.0" in message


def test_a_disk_with_too_little_room(hf, refused, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 1000, 1000))
    message = refused("convert", "--hf", hf)
    assert re.search(r"[\d.]+ MB are needed, 0.0 MB are free; free some", message)


def test_a_disk_that_fills_up_on_the_way(hf, refused):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        message = refused("convert", "--hf", hf)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "out cannot be written" in message and "set --out to" in message


@pytest.mark.parametrize("out", ["/proc/out", "file/out"])
def test_an_output_nobody_can_write(out, hf, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert tool("convert", "--hf", hf, "--out", tmp_path / out) == 2
    assert re.search("cannot be written .*set --out to another folder", capsys.readouterr().err)


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_table_of_contents_runs_no_code_and_changes_no_class(megatron, refused, tmp_path):
    """Pickle sets attributes on what a name stands for; here it stands for nothing shared."""
    gone_off = tmp_path / "gone_off"
    (megatron / ".metadata").write_bytes(pickle.dumps(Bomb(gone_off)))
    message = refused("export", "--ckpt", megatron)
    assert "is not the table of contents of a torch_dist checkpoint" in message
    assert not gone_off.exists()
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
        assert "is not the table of contents" in refused("export", "--ckpt", megatron)
        assert not hasattr(getattr(importlib.import_module(module), name), "taint")


def test_chunks_with_a_hole_between_them(megatron, refused):
    """The first half twice and the second not at all are as many elements as the whole."""
    files: dict[str, list] = {}
    for key, tensor in TorchDistReader(megatron).tensors.items():
        for stored in tensor.chunks:
            chunk = Chunk(key, tensor.shape, stored.part, torch.float32)
            if key != "output_layer.weight":
                files.setdefault(stored.file, []).append((chunk, stored.start, stored.length))
    halves = [
        Chunk("output_layer.weight", (128, 64), Slice((start, 0), (64, 64)), torch.float32)
        for start in (0, 32)
    ]
    half = torch.ones(64, 64)
    files["__9_0.distcp"] = write_chunks(megatron / "__9_0.distcp", ((h, half) for h in halves))
    write_table(megatron, files)
    message = refused("export", "--ckpt", megatron)
    assert "tensor output_layer.weight" in message and "is not whole" in message


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_hidden_layers": 2}, "[4, 64] where config.json says [2, 64]"),
        ({"tie_word_embeddings": True}, "tensor output_layer.weight"),
        ({"model_type": "llama"}, "linear_qkv.bias"),
        ({"vocab_size": 200}, "[128, 64] where config.json says [200, 64]"),
        ({"qurl": {"uaq_scale": 0}}, "does not name a UAQ factor"),
    ],
)
def test_a_config_of_another_model_beside_megatron_weights(megatron, change, message, refused):
    config(**change)(megatron / "hf")
    assert message in refused("export", "--ckpt", megatron)


def test_a_megatron_file_that_is_cut_off(megatron, refused):
    file = megatron / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-3000])
    message = refused("export", "--ckpt", megatron)
    assert "cannot be read from" in message and "the file is damaged" in message
    file.unlink()
    assert "names __0_0.distcp, which is not in" in refused("export", "--ckpt", megatron)


def test_a_megatron_checkpoint_of_nobody_knows_what(megatron, hf, refused, tmp_path):
    shutil.rmtree(megatron / "hf")
    message = refused("export", "--ckpt", megatron)
    assert "does not say what model it is" in message and "--hf" in message
    assert tool("export", "--ckpt", megatron, "--hf", hf, "--out", tmp_path / "back") == 0


def test_a_quantized_source(hf, refused, tmp_path):
    quantized = tmp_path / "quantized"
    assert tool("quantize", "--model", hf, "--scheme", "int8", "--out", quantized) == 0
    message = refused("quantize", "--model", quantized, "--scheme", "fp8")
    assert f"{quantized}/config.json: quantization_config means quantized weights" in message


@pytest.mark.parametrize(
    "name", ["hf_to_megatron", "megatron_to_hf", "quantize", "inspect", "diff"]
)
def test_a_tool_runs_as_a_script_and_explains_itself(name):
    done = subprocess.run(
        [sys.executable, TOOLS / f"{name}.py", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "usage: qurl" in done.stdout, done.stderr
