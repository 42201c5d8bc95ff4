"""Files of a model that hold what no model has: one sentence with the file and the key."""

import json
import re

import pytest

from qurl_megatron.checkpoints.places import find_torch_dist
from qurl_megatron.data.rows import Question
from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.kit.disk import read_json
from qurl_megatron.kit.errors import ConfigError, Unreadable
from qurl_megatron.tensors.arch import arch_of, read_eos
from qurl_megatron.training.warmstart import build_tokenizer
from tests.support.descriptions import QWEN2

CONFIG = QWEN2 | {"eos_token_id": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WRONG = [
    ("rms_norm_eps", "x"),
    ("rms_norm_eps", float("nan")),
    ("rope_theta", 0),
    ("rope_theta", 10**400),
    ("rope_parameters", [1]),
    ("rope_scaling", {**LLAMA3, "factor": "8", "original_max_position_embeddings": 8192}),
    ("rope_scaling", {**LLAMA3, "original_max_position_embeddings": 0.5}),
    ("num_hidden_layers", 10**30),
    ("hidden_size", True),
    ("head_dim", 0.5),
    ("vocab_size", -1),
    ("tie_word_embeddings", "yes"),
    ("layer_types", 3),
    ("layer_types", [["full_attention"]]),
    ("hidden_act", {"name": "silu"}),
    ("eos_token_id", "</s>"),
    ("eos_token_id", [1, None]),
]
NOT_JSON = {
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "digits": b'{"eos_token_id": ' + b"9" * 5000 + b"}",
    "utf-16": "{}".encode("utf-16"),
    "empty": b"",
    "a list": b"[]",
}


def write(folder, name, content) -> None:
    if not isinstance(content, bytes):
        content = json.dumps(content).encode()
    (folder / name).write_bytes(content)


@pytest.fixture
def model(tmp_path):
    write(tmp_path, "config.json", CONFIG)
    arch_of(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("key", "value"), WRONG, ids=lambda one: f"{one!r:.30}")
def test_a_value_of_config_json_that_no_model_has_is_refused_by_its_key(model, key, value):
    write(model, "config.json", CONFIG | {key: value})
    named = "factor" if isinstance(value, dict) and isinstance(value.get("factor"), str) else key
    named = "original_max" if isinstance(value, dict) and named == "rope_scaling" else named
    with pytest.raises(ConfigError, match=f"{re.escape(str(model))}/config.json: {named}") as error:
        arch_of(model)
        read_eos(model)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("content", NOT_JSON.values(), ids=NOT_JSON)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_json_object_is_refused_by_its_name(model, name, content):
    write(model, name, content)
    with pytest.raises(ConfigError, match=f"/{name} (is not valid JSON|must hold a JSON object)"):
        read_eos(model)


def test_a_tracker_of_other_content_is_refused_by_its_name(model):
    tracker = "latest_checkpointed_iteration.txt"
    for content in (b"\xff\xfe", b"7" * 10_000, b"../../etc", b"1\x00"):
        write(model, tracker, content)
        with pytest.raises(ConfigError, match=tracker):
            find_torch_dist(model)


def test_a_file_that_the_system_does_not_read_is_not_called_damaged(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(Unreadable, match="config.json cannot be read"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    "content", [b"{}", b"[]", b"\xff", NOT_JSON["deep"], {"model": 3}, {"version": "1.0"}]
)
def test_tokenizer_files_of_other_content_are_refused_by_their_folder(tmp_path, content):
    write(tmp_path, "tokenizer.json", content)
    with pytest.raises(ConfigError, match=f"the tokenizer in {tmp_path} cannot be loaded"):
        next(Tokenizer(tmp_path).read([Question("1 + 1", "2")], chat=False))


def test_a_template_that_calls_itself_is_refused_by_its_file(tmp_path):
    build_tokenizer([Question("1 + 1", "2")]).save_pretrained(tmp_path)
    endless = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"
    (tmp_path / "chat_template.jinja").write_text(endless)
    with pytest.raises(ConfigError, match="chat_template.jinja.* refuses the prompt's turns"):
        next(Tokenizer(tmp_path).read([Question("1 + 1", "2")], chat=True))
