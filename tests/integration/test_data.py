"""Other trainers' files, trained on and evaluated as they are by the real command line."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.datasets import slime_lines, verl_table
from tests.support.models import tiny_checkpoint
from tests.support.runs import qurl, rollouts

LONG = " ".join(["1 +"] * 20)
QUESTIONS = [(f"{i} + 1 =", str(i + 1)) for i in range(5)] + [(LONG, "20")]
WORDS = ["?", "</s>", "system", "user", "assistant", "you", "add", "+", "=", *map(str, range(99))]
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"
SETTINGS = [
    *("model.dtype=float32", "rollout.engines=1", "rollout.samples_per_prompt=2"),
    *("rollout.max_new_tokens=4", "reward.kind=last_number", "data.prompts_per_step=5"),
    *("data.max_prompt_tokens=20", "train.steps=1", "train.micro_batch=5"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A random model with a word for each token, and a chat template."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("data") / "model", "qwen2")
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_verls_table_is_trained_on_and_slimes_lines_are_held_out_as_they_are(model, tmp_path):
    verl = verl_table(tmp_path / "verl.parquet", QUESTIONS)
    slime = slime_lines(tmp_path / "slime.jsonl", QUESTIONS)
    (tmp_path / "recipe.toml").write_text(f'[model]\npath = "{model}"\n')
    run = tmp_path / "run"
    files = (f"data.path={verl}", f"data.eval_path={slime}", "train.eval_prompts=2")
    more = (*files, f"train.run_dir={run}", "train.save_rollouts=true")
    done = qurl("train", tmp_path / "recipe.toml", *SETTINGS, *more)
    for file in files[:2]:
        assert f"{file}: 6 prompts in prompt (chats), answers in " in done.stdout
    assert "; kept as metadata: " in done.stdout
    assert "1 of 6 training prompts are longer than data.max_prompt_tokens=20" in done.stdout
    prompts = [sample["prompt"] for sample in rollouts(run, 1)]
    [zero] = [prompt for prompt in prompts[::2] if prompt["answer"] == "1"]
    text = "system you add user 0 + 1 = assistant"
    assert [WORDS[i] for i in zero["input_ids"]] == text.split()
    assert zero["metadata"]["data_source"] == "sums/main"
