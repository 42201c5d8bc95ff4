"""The tokenizer of a model folder."""

import json
import shutil

import pytest

from qurl_megatron.data.rows import Question
from qurl_megatron.data.tokenizer import Tokenizer
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.observe.samples import example_of
from qurl_megatron.training.warmstart import build_tokenizer
from qurl_megatron.types import Prompt, Sample

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


def encode(tokenizer, text="", *turns, chat=False):
    [ids] = tokenizer.read([Question(text, "", turns=turns)], chat=chat)
    return ids


def test_text_comes_back_without_special_tokens(folder):
    tokenizer = Tokenizer(folder)
    ids = encode(tokenizer, "-12 + 4")
    assert tokenizer.decode([*ids, EOS]) == "-12 + 4"
    assert tokenizer.decode([]) == ""


def test_a_chat_prompt_is_one_user_turn_open_for_the_answer(folder):
    tokenizer = Tokenizer(folder)
    with pytest.raises(ConfigError, match="data.chat=true, but .* has no chat template"):
        encode(tokenizer, "4 + 1", chat=True)
    tokenizer._wrapped.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} ?{% endif %}"
    )
    assert encode(tokenizer, "4 + 1", chat=True) == encode(tokenizer, "4 + 1 ?")


def test_turns_go_through_the_template_whether_or_not_texts_do(folder):
    tokenizer = Tokenizer(folder)
    turns = [{"role": "system", "content": "4"}, {"role": "user", "content": "17"}]
    with pytest.raises(ConfigError, match="the prompt is a list of turns, but .* no chat template"):
        encode(tokenizer, "", *turns)
    tokenizer._wrapped.chat_template = TEMPLATE
    assert encode(tokenizer, "", *turns) == encode(tokenizer, "4 + 17 -")
    assert encode(tokenizer, "", *turns, chat=True) == encode(tokenizer, "", *turns)
    assert encode(tokenizer, "17", chat=True) == encode(tokenizer, "17 -")
    with pytest.raises(ConfigError, match="line 2, refuses .* turns .roles must alternate"):
        encode(tokenizer, "", *turns, turns[1])


def test_a_question_without_any_known_word_is_refused_with_its_line(folder):
    question = Question("Hello there", "1", place="data.path=q.jsonl, line 3")
    with pytest.raises(
        ConfigError, match=r"^data.path=q.jsonl, line 3: the tokenizer in .* no tok"
    ):
        list(Tokenizer(folder).read([question], chat=False))


def test_a_tokenizer_with_tokens_that_the_model_has_not_is_refused_with_the_line(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8}))
    question = Question("4 + 17", "21", place="data.path=q.jsonl line 3")
    with pytest.raises(ConfigError, match=r"^data.path=q.jsonl line 3: .* the model has 8 tokens"):
        list(Tokenizer(tmp_path).read([question], chat=False))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 128}))
    list(Tokenizer(tmp_path).read([question], chat=False))


def test_of_a_conversation_a_reader_sees_who_said_what_and_a_reward_the_policy_alone(folder):
    tokenizer = Tokenizer(folder)
    parts = [(encode(tokenizer, text), mine) for text, mine in (("4 +", 1), ("17", 0), ("4", 1))]
    ids = [id for part, _ in parts for id in part]
    written = [bool(mine) for part, mine in parts for _ in part]
    versions = ((0, sum(written)),)
    sample = Sample(
        Prompt(0, (1,), "", ""), ids, (-1.0,) * len(ids), "stop", versions, written=written
    )
    first, last = (tokenizer.decode(list(part)) for part, mine in parts if mine)
    assert tokenizer.texts_of(sample) == (f"{first}\n> 17\n{last}", f"{first}\n{last}")
    assert example_of(sample, 1, "train").tokens == sum(written) < len(ids)


def test_prompts_read_together_have_the_ids_of_each_by_itself(folder, monkeypatch):
    monkeypatch.setattr("qurl_megatron.data.tokenizer.BATCH", 2)
    tokenizer = Tokenizer(folder)
    tokenizer._wrapped.chat_template = TEMPLATE
    turns = ({"role": "user", "content": "17"},)
    asked = [Question("4 + 17", ""), Question("", "", turns=turns), *[Question("4", "")] * 3]
    read = list(tokenizer.read(asked, chat=False))
    assert read == [encode(tokenizer, question.text, *question.turns) for question in asked]
    assert len({*read}) == 3


def test_a_mistake_in_a_chat_template_is_reported_with_its_file_and_line(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    file = tmp_path / "chat_template.jinja"
    question = Question("", "", turns=({"role": "user", "content": "4"},), place="FILE line 3")
    file.write_text("{{ 1 }}\n{% for m in %}\n")
    malformed = rf"^FILE line 3: the chat template in {file}, line 2, refuses the prompt"
    with pytest.raises(ConfigError, match=malformed):
        list(Tokenizer(tmp_path).read([question], chat=False))
    file.write_text("{{ 1 }}\n\n{{ messages[0].content + 1 }}\n")
    with pytest.raises(
        ConfigError, match=rf"template in {file}, line 3, refuses .* turns .can only con"
    ):
        encode(Tokenizer(tmp_path), "4", chat=True)
    for broken in ("1 // 0", "10.0 ** 400", "'4'.encode('none')", "range(10 ** 9)"):
        file.write_text(f"{{{{ {broken} }}}}")
        with pytest.raises(ConfigError, match=rf"template in {file}, line 1, refuses the prompt"):
            encode(Tokenizer(tmp_path), "4", chat=True)


def test_a_folder_without_a_tokenizer_is_refused_at_once(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")  # says nothing of tokens
    with pytest.raises(ConfigError, match=r"^model.path=\S+ holds no tokenizer.json \(nor "):
        Tokenizer(tmp_path)
