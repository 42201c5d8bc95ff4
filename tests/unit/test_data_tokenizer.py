"""The tokenizer of a model folder."""

import json
import re
import shutil

import pytest
from tokenizers import Tokenizer as Splitter
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from qurl_megatron.data.rows import Question
from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.errors import ConfigError
from qurl_megatron.training.warmstart import build_tokenizer

EOS = 1
TEMPLATE = """{% for m in messages %}{% if m.role == "user" and not loop.last %}
{{- raise_exception("roles must alternate") }}{% endif %}
{{- m.content }}{% if not loop.last %} + {% endif %}{% endfor %}
{%- if add_generation_prompt %} -{% endif %}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    build_tokenizer([Question("What is 4 + 17 ?", "21")]).save_pretrained(path)
    return path


def test_text_comes_back_without_special_tokens(folder):
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode("-12 + 4")
    assert tokenizer.decode([*ids, EOS]) == "-12 + 4"
    assert tokenizer.decode([]) == ""


def test_a_chat_prompt_is_one_user_turn_open_for_the_answer(folder):
    tokenizer = Tokenizer(folder)
    with pytest.raises(ConfigError, match="data.chat=true, but .* has no chat template"):
        tokenizer.encode("4 + 1", chat=True)
    tokenizer._wrapped.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} ?{% endif %}"
    )
    unknown = tokenizer.encode("u")
    assert tokenizer.encode("4 + 1", chat=True) == unknown + tokenizer.encode("4 + 1 ?")


def test_turns_go_through_the_template_whether_or_not_texts_do(folder):
    tokenizer = Tokenizer(folder)
    turns = [{"role": "system", "content": "4"}, {"role": "user", "content": "17"}]
    with pytest.raises(ConfigError, match="the prompt is a list of turns, but .* no chat template"):
        tokenizer.encode(turns)
    tokenizer._wrapped.chat_template = TEMPLATE
    assert tokenizer.encode(turns) == tokenizer.encode("4 + 17 -")
    assert tokenizer.encode(turns, chat=True) == tokenizer.encode(turns)
    assert tokenizer.encode("17", chat=True) == tokenizer.encode("17 -")
    with pytest.raises(ConfigError, match="refuses the prompt's turns: roles must alternate"):
        tokenizer.encode([*turns, turns[1]])


def test_a_prompt_that_autotokenizer_splits_otherwise_is_told(folder, tmp_path):
    prompts = ["4 + 17", "What is 4 ?"]
    assert Tokenizer(folder).disagreement(prompts) == ""
    other = shutil.copytree(folder, tmp_path / "other")
    settings = json.loads((other / "tokenizer_config.json").read_text())
    # A class with splitting rules of its own, as many families have one.
    settings["tokenizer_class"] = "GPT2Tokenizer"
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    told = Tokenizer(other).disagreement(prompts)
    assert told.startswith(f"{other}: tokenizer.json, which is used here, and AutoTokenizer")
    assert re.search(
        r"give 2 of the first 2 prompts different ids \(the first at position \d", told
    )


def test_text_that_a_tokenizer_has_no_token_for_is_found(folder, tmp_path):
    tokenizer = Tokenizer(folder)
    assert tokenizer.unknown("What is 4 + 17 ?") == ""
    assert tokenizer.unknown("What is 4 plus 17 ?") == "plus"
    assert tokenizer.unknown("4 é") == "é" and tokenizer.unknown("4 ") == ""
    tokenizer._wrapped.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %} ü"
    assert tokenizer.unknown("4", chat=True) == "ü"
    bytes_alone = tmp_path / "bytes"
    vocabulary = {"a": 0, "b": 1, "Ġ": 2}  # no unknown token: what is missing is left out
    split = Splitter(BPE(vocab=vocabulary, merges=[]))
    split.pre_tokenizer = ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=split).save_pretrained(bytes_alone)
    assert [Tokenizer(bytes_alone).unknown(text) for text in ("a b", "a cb", "ab\u00e9")] == [
        "",
        "cb",
        "ab\u00e9",
    ]


def test_a_folder_without_a_tokenizer_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no tokenizer \(none of tokenizer.json"):
        Tokenizer(tmp_path)


def test_a_broken_tokenizer_is_refused_when_it_is_used(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Tokenizer(tmp_path).encode("1")
