"""A small model made on the spot is a checkpoint like any other."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from qurl_megatron.config import DataConfig, WarmstartConfig
from qurl_megatron.data.questions import held_out_questions
from qurl_megatron.data.rows import Question
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.tensors.arch import read_eos
from qurl_megatron.training.warmstart import accuracy, build_tokenizer, save_tokenizer, warmstart

# 1-digit sums and 2-digit ones: small enough to learn something in seconds.
DATA = DataConfig(
    task="chain_sum",
    task_args={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    task_size=2000,
)
TINY = WarmstartConfig(
    steps=30, hidden=32, layers=2, heads=2, kv_heads=2, intermediate=64, batch=32, lr=1e-2
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, accuracy, log lines)"""
    lines: list[str] = []
    folder = tmp_path_factory.mktemp("warm") / "new" / "model"
    return folder, warmstart(folder, DATA, TINY, lines.append), lines


def test_the_checkpoint_is_whole_and_in_bf16(made):
    folder, _, _ = made
    assert {f.name for f in folder.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen2" and config["dtype"] == "bfloat16"
    assert config["vocab_size"] % 16 == 0
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert read_eos(folder) == (1,)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]  # no scratch folder left


def test_the_accuracy_is_that_of_the_saved_model_on_held_out_questions(made):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, reported, _ = made
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    held_out = held_out_questions(DATA, 256)
    assert accuracy(model, tokenizer, held_out) == reported
    right = 0
    for question in held_out:
        ids = tokenizer(question.text, return_tensors="pt")["input_ids"]
        answer = model.generate(ids, do_sample=False, max_new_tokens=5)[0, ids.shape[1] :]
        text = tokenizer.decode(answer, skip_special_tokens=True)
        right += text.removesuffix(".") == question.answer
    assert right == 256 * reported > 0


def test_a_share_of_the_answers_it_learns_from_is_untidy(monkeypatch, tmp_path):
    from qurl_megatron.training import warmstart as module

    seen = []
    pad = module._pad
    monkeypatch.setattr(module, "_pad", lambda pairs: seen.extend(pairs) or pad(pairs))
    monkeypatch.setattr(module, "accuracy", lambda *given: 0.0)
    warmstart(tmp_path / "model", DATA, TINY, lambda line: None)
    stops = [answer[-2] for _, answer in seen].count(3)  # "." is the fourth token
    assert 0.4 < stops / len(seen) < 0.6


def test_the_fit_lowers_the_loss_and_stops_at_the_target(made, tmp_path):
    _, _, lines = made
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines if "loss" in line]
    assert losses[-1] < 2.5  # log(15 tokens that may follow) = 2.7 at the start
    early: list[str] = []
    warmstart(tmp_path / "early", DATA, replace(TINY, target=1e-3, lr=2e-2), early.append)
    assert "step 25/30" in early[-1]


def test_the_same_seed_makes_the_same_weights_and_leaves_the_global_generator_alone(made, tmp_path):
    folder, _, _ = made
    state = torch.random.get_rng_state()
    warmstart(tmp_path / "again", DATA, TINY, lambda line: None)
    assert torch.equal(torch.random.get_rng_state(), state)
    first, again = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "again"))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_held_out_questions_are_never_fitted_or_put_into_the_vocabulary(monkeypatch, tmp_path):
    asked: list[str] = []
    from qurl_megatron.training import warmstart as module

    encode = module.encode
    monkeypatch.setattr(module, "encode", lambda t, q: asked.append(q.text) or encode(t, q))
    monkeypatch.setattr(module, "accuracy", lambda *given: 0.0)
    warmstart(tmp_path / "model", DATA, replace(TINY, steps=1), lambda line: None)
    assert asked and not set(asked) & {q.text for q in held_out_questions(DATA, 256)}


def test_whoever_loads_the_folder_reads_the_same_ids(made):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder, _, _ = made
    codecs = [load.from_pretrained(folder) for load in (AutoTokenizer, PreTrainedTokenizerFast)]
    task = "State the final answer to the following arithmetic problem:"
    for text in (f"{task} 48 - 5 =", "-12", "  4\n+ 7.", "4 \u4e2d 5", f"{task} {task}"):
        ids = [codec(text)["input_ids"] for codec in codecs]
        assert ids[0] == ids[1] != []
        assert max(ids[0]) < json.loads((folder / "config.json").read_text())["vocab_size"]
    assert type(codecs[0]).__name__ == "Qwen2Tokenizer"  # whatever the folder says
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    # Version 4 of transformers would return another by default, which a Qwen2 refuses.
    assert settings["model_input_names"] == ["input_ids", "attention_mask"]
    assert all(len(codec) == len(codecs[0]) <= 32 for codec in codecs)  # none was added


def test_text_survives_the_tokenizer_and_whoever_loads_it(tmp_path):
    from transformers import AutoTokenizer

    texts = ["-12", "85", "198", "0", "State the sum : 4 - 17 ="]
    tokenizer = build_tokenizer([Question(text, "no") for text in texts])
    save_tokenizer(tokenizer, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    for codec in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert [codec.decode(codec(text)["input_ids"]) for text in texts] == texts


def test_a_file_without_one_for_held_out_prompts_lends_its_last_rows(monkeypatch, tmp_path):
    rows = [{"prompt": f"{i} =", "answer": str(i)} for i in range(100, 140)]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked: list[Question] = []
    monkeypatch.setattr(
        "qurl_megatron.training.warmstart.accuracy",
        lambda model, tokenizer, questions: asked.append(questions) or 0.0,
    )
    warmstart(tmp_path / "model", DataConfig(path=str(path)), replace(TINY, steps=1), str)
    fitted, held_out = [[question.answer for question in some] for some in asked]
    assert fitted == [str(i) for i in range(100, 138)] and held_out == ["138", "139"]


def test_regular_expression_characters_in_the_questions_are_only_characters():
    text = "If (a|b)* = [x^n], then f\\{é} is? "
    tokenizer = build_tokenizer([Question(f"{text}{i} ?", "1") for i in range(3)])
    assert tokenizer.convert_ids_to_tokens(tokenizer(f"{text}2 ?")["input_ids"]) == [
        text.rstrip(),
        " 2",
        " ?",
    ]


def test_a_taken_folder_is_refused_and_a_failed_fit_leaves_nothing(made, tmp_path):
    folder, _, _ = made
    with pytest.raises(ConfigError, match="exists already"):
        warmstart(folder, DATA, TINY, print)
    with pytest.raises(ConfigError, match="is not a reasoning-gym task"):
        warmstart(tmp_path / "model", DataConfig(task="chainsum"), TINY, print)
    assert not any(tmp_path.iterdir())
