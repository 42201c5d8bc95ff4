"""The tokenizer of a model folder."""

import pytest

from qurl_megatron.data.questions import Question
from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.errors import ConfigError
from qurl_megatron.training.warmstart import build_tokenizer

EOS = 1


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


def test_a_folder_without_a_tokenizer_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no tokenizer \(none of tokenizer.json"):
        Tokenizer(tmp_path)


def test_a_broken_tokenizer_is_refused_when_it_is_used(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Tokenizer(tmp_path).encode("1")
