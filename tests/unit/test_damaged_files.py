"""Whatever a file holds, its reader returns a value or the one error that a user can fix.

Each reader is given valid files, damaged in some hundred ways.
"""

import contextlib
import errno
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given

from qurl_megatron.checkpoints.huggingface import INDEX, HfReader
from qurl_megatron.checkpoints.integrity import RECORD, read_record, write_record, wrong_size
from qurl_megatron.checkpoints.torch_dist import Chunk, TorchDistReader, write_chunks, write_table
from qurl_megatron.checkpoints.uaq import folded_scale
from qurl_megatron.cli import main
from qurl_megatron.config import DataConfig, load, to_toml
from qurl_megatron.data.questions import training_questions
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.sinks import JsonlSink, read_metrics
from qurl_megatron.observe.timeline import Timeline
from qurl_megatron.quant.export import read_quantization
from qurl_megatron.tensors.arch import read_arch, read_config
from qurl_megatron.tensors.slice import Slice
from qurl_megatron.training.state import RECIPE, STATE, TrainState, refuse_other_run
from tests.support.descriptions import QWEN2, RECIPE_TEXT
from tests.support.disks import flip
from tests.support.fuzz import damaged, damaged_bytes, examples

FIXABLE = contextlib.suppress(ConfigError)  # all else fails the test


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged")


def put(path, content: bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


CHAT = {
    "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "1 + 1 ="}],
    "reward_model": {"ground_truth": "2"},
}


def _table() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"prompt": ["1 + 1 =", "x"] * 4, "answer": ["2", "y"] * 4}), sink)
    return sink.getvalue().to_pybytes()


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


QUANTIZED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token"},
        }
    },
    "ignore": ["lm_head"],
}


TRAINED = {"step": 4, "cursor": {"epoch": 0}, "accuracy": 0.5, "guard": {"kl": 1}}
SUMS = {"format": "qurl-files-1", "files": {"__0_0.distcp": [4, "ab"], "hf/config.json": [2, ""]}}


def with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(32)


def read_questions(path: Path) -> None:
    for question in training_questions(DataConfig(path=str(path))):
        (question.text + question.answer).encode()


def read_weights(path: Path) -> None:
    reader = HfReader(path.parent)
    for name in reader.stored:
        reader.whole(name)


def read_index(path: Path) -> None:
    put(path.with_name("x.safetensors"), with_header(json.dumps(HEADER).encode()))
    HfReader(path.parent)


def read_model(path: Path) -> None:
    config = read_config(path.parent)
    folded_scale(config)
    read_arch(config)


def read_state(path: Path) -> None:
    state = TrainState.read(path.parent)
    assert state.step >= 0
    state.summary(right_or_wrong=True)


def go_on_with_metrics(path: Path) -> None:
    with FIXABLE:
        read_metrics(path)
    JsonlSink(path, resume_step=2).close()
    assert path.read_bytes().startswith(METRICS)


def go_on_with_timeline(path: Path) -> None:
    with FIXABLE:
        Timeline.read(path)
    Timeline(path, resume_step=2).close()


METRICS = b'{"step": 1, "time": 1.0, "metrics": {"a": 1.0}}\n'
SPAN = b'{"lane": "a", "name": "x", "step": 1, "start": 1.0, "end": 2.0}\n'
INDEXED = {"metadata": {}, "weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}
LINE = b'{"prompt": "a", "answer": "b"}\n'
FILES = {
    "recipe.toml": (damaged_bytes(RECIPE_TEXT.encode()), load),
    "text.jsonl": (damaged({"prompt": "1 + 1 =", "answer": "2"}).map(LINE.__add__), read_questions),
    "chat.jsonl": (damaged(CHAT).map(LINE.__add__), read_questions),
    "prompts.parquet": (damaged_bytes(_table()), read_questions),
    "metrics.jsonl": (
        damaged({"step": 3, "time": 1.5, "metrics": {"reward/mean": 0.5, "x": "NaN"}}).map(
            lambda line: METRICS + line + b"\n" + METRICS
        ),
        go_on_with_metrics,
    ),
    "timeline.jsonl": (
        damaged({"lane": "engines", "name": "x", "step": 1, "start": 1.0, "end": 2.0}).map(
            lambda line: SPAN + line + b"\n" + SPAN
        ),
        go_on_with_timeline,
    ),
    "weights/model.safetensors": (damaged(HEADER).map(with_header), read_weights),
    f"indexed/{INDEX}": (damaged(INDEXED), read_index),
    "described/config.json": (damaged(QWEN2), read_model),
    "quantized/config.json": (
        damaged({"quantization_config": QUANTIZED}),
        lambda path: read_quantization(read_config(path.parent)),
    ),
    f"trained/{STATE}": (damaged(TRAINED), read_state),
    f"recorded/{RECORD}": (
        damaged(SUMS),
        lambda path: wrong_size(path.parent, read_record(path.parent)),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_gives_a_value_or_the_error_that_a_user_can_fix(name, place):
    contents, read = FILES[name]

    @given(content=contents)
    @examples(250)
    def check(content):
        path = put(place / name, content)
        with FIXABLE:
            read(path)

    check()


def test_the_config_that_is_damaged_is_read_when_it_is_whole(place):
    put(place / "described/config.json", json.dumps(QWEN2).encode())
    assert read_arch(read_config(place / "described")).num_layers == 3


@given(content=damaged_bytes(RECIPE_TEXT.encode()))
@examples(200)
def test_the_recipe_that_a_run_keeps(place, content):
    run = place / "run"
    now = load(put(place / "good.toml", RECIPE_TEXT.encode()))
    put(run / f"checkpoints/step_000001/{STATE}", b"{}")
    put(run / RECIPE, content)
    with FIXABLE:
        refuse_other_run(run, now)
    assert load(put(run / RECIPE, to_toml(now).encode())) == now


@pytest.fixture(scope="module")
def megatron(place):
    folder = place / "megatron"
    folder.mkdir()
    ones = torch.ones(1, 3).bfloat16()
    values = [(Chunk(f"k{n}", (2, 3), Slice((n, 0), (1, 3))), ones) for n in range(2)]
    rows = {"__0_0.distcp": write_chunks(folder / "__0_0.distcp", values)}
    write_table(folder, rows)
    assert torch.equal(TorchDistReader(folder).read("k1", Slice((1, 0), (1, 3))), ones)
    return folder


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_tables_and_chunks_of_megatron_checkpoints(name, megatron, tmp_path):
    folder = shutil.copytree(megatron, tmp_path / "torn")

    @given(content=damaged_bytes((megatron / name).read_bytes()))
    @examples(400)
    def check(content):
        put(folder / name, content)
        with FIXABLE:
            reader = TorchDistReader(folder)
            for key in reader.tensors:
                reader.read(key, Slice((0, 0), (1, 3)))

    check()


def test_a_damaged_checkpoint_is_not_evaluated(megatron, tmp_path, capsys):
    folder = shutil.copytree(megatron, tmp_path / "checkpoint")
    put(folder / "hf/config.json", json.dumps(QWEN2).encode())
    write_record(folder, {})
    flip(folder / "__0_0.distcp")
    problems = tmp_path / "problems.jsonl"
    command = ["eval", str(problems), "--model", str(folder)]
    assert main(command) == 2 and "problems.jsonl" in capsys.readouterr().err
    problems.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    assert main(command) == 2
    assert "__0_0.distcp has changed since it was written" in capsys.readouterr().err


def test_a_table_that_asks_for_more_memory_than_there_is_is_damaged(megatron, tmp_path):
    folder = shutil.copytree(megatron, tmp_path / "copy")
    table = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(
        table[:-1] + pickle.BINBYTES8 + (1 << 55).to_bytes(8, "little")
    )
    with pytest.raises(ConfigError, match="is not the table of contents"):
        TorchDistReader(folder)


class FailingDisk(io.FileIO):
    def read(self, size=-1):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_disk_that_fails_is_not_called_damage(megatron, monkeypatch):
    reader = TorchDistReader(megatron)
    monkeypatch.setattr(Path, "open", lambda path, *_, **__: FailingDisk(path))
    with pytest.raises(ConfigError, match="cannot be read .Input/output error.$"):
        reader.read("k0", Slice((0, 0), (1, 3)))


def test_a_table_on_a_disk_that_fails_is_not_called_damaged(megatron, tmp_path):
    folder = shutil.copytree(megatron, tmp_path / "copy")
    (folder / ".metadata").unlink()
    (folder / ".metadata").symlink_to("/proc/self/mem")  # whose first bytes cannot be read
    with pytest.raises(ConfigError, match="metadata cannot be read .Input/output error.$"):
        TorchDistReader(folder)


READS_IN_SMALL_ROOM = """
import resource, sys, psutil
from pathlib import Path
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.slice import Slice
from qurl_megatron.checkpoints.torch_dist import TorchDistReader
reader, size = TorchDistReader(Path(sys.argv[1])), int(sys.argv[2])
room = psutil.Process().memory_info().vms + size // 4
resource.setrlimit(resource.RLIMIT_AS, (room, room))
try:
    reader.read("k", Slice((0,), (size,)))
except ConfigError as error:
    sys.exit(str(error))
"""


def test_too_little_memory_is_not_called_damage(tmp_path):
    size = 256 << 20
    chunk = Chunk("k", (size,), Slice.whole((size,)), torch.uint8)
    rows = write_chunks(tmp_path / "__0_0.distcp", [(chunk, torch.zeros(size, dtype=torch.uint8))])
    write_table(tmp_path, {"__0_0.distcp": rows})
    # In a process of its own: memory that other tests free here would make room.
    command = [sys.executable, "-c", READS_IN_SMALL_ROOM, tmp_path, str(size)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "tensor k does not fit in memory" in ended.stderr, ended.stderr


def test_a_record_finds_every_kind_of_damage(place):
    folder = place / "whole"
    put(folder / "a", pickle.dumps(list(range(100))))
    write_record(folder, {})

    @given(content=damaged_bytes((folder / "a").read_bytes()))
    @examples(200)
    def check(content):
        from qurl_megatron.checkpoints.integrity import damaged as found

        before = (folder / "a").read_bytes()
        put(folder / "a", content)
        record = read_record(folder)
        assert (found(folder, record, record) is None) == (content == before)
        put(folder / "a", before)

    check()
