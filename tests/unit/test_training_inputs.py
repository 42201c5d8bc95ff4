"""What a run reads is checked before ranks start, and by a dry run."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from qurl_megatron.cli import main
from qurl_megatron.config import RolloutConfig, load
from qurl_megatron.data.rows import Question
from qurl_megatron.kit.errors import ConfigError
from qurl_megatron.schemes import simulation
from qurl_megatron.tensors.arch import Experts, read_arch
from qurl_megatron.training.inputs import check_files, describe_data, doubts, longest_prompt
from qurl_megatron.training.shapes import check_computed
from qurl_megatron.training.warmstart import build_tokenizer
from tests.support.descriptions import QWEN2

GOOD = {"prompt": "1 + 1 =", "answer": "2", "level": 3}


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, rows in (("train", [GOOD, GOOD]), ("eval", [GOOD])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "recipe.toml"
    path.write_text(
        '[model]\npath = "model"\n[warmstart]\nsteps = 10\n'
        '[data]\npath = "train.jsonl"\neval_path = "eval.jsonl"\n'
        "[rollout]\nmax_new_tokens = 4\n[train]\neval_prompts = 2\n"
    )
    return path


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("train", {"text": "1 + 1 ="}, "data.path=train.jsonl line 3 has no prompt or .*"),
        ("eval", {"prompt": "1 + 2 ="}, "data.eval_path=eval.jsonl line 2 has no .* or answer"),
    ],
    ids=["training", "held-out"],
)
def test_a_mistake_in_the_data_is_found_before_a_model_is_made(name, row, said, recipe, capsys):
    with Path(f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    assert main(["train", str(recipe)]) == 2
    out, err = capsys.readouterr()
    with pytest.raises(ConfigError, match=said) as found:
        check_files(load(recipe))
    assert err == f"qurl: {found.value}\n" and out == ""
    assert not Path("model").exists()
    with pytest.raises(ConfigError, match=said):
        describe_data(load(recipe))


def test_a_path_that_leads_nowhere_says_where_it_was_looked_for(recipe, tmp_path):
    config = load(recipe, ["data.path=data/train.jsonl"])
    looked = tmp_path / "data/train.jsonl"
    for refuses in (check_files, describe_data):
        with pytest.raises(ConfigError) as found:
            refuses(config)
        assert str(found.value) == (
            "data.path=data/train.jsonl does not exist or is not a file: a relative path begins at "
            f"the working folder, so that is {looked}"
        )


def test_rows_without_answers_are_for_rewards_of_ones_own(recipe):
    rows = [{"prompt": "1"}, {"prompt": "2", "answer": None}, {"prompt": "3", "label": "4"}]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="or have a reward function of your own do without"):
        check_files(load(recipe))
    own = load(recipe, ["reward.function=own:score", "train.eval_prompts=0"])
    check_files(own)
    assert describe_data(own)[0] == "data.path=train.jsonl: 3 prompts in prompt, no answers"
    typo = load(recipe, ["reward.function=own:score", "data.answer_key=answr"])
    with pytest.raises(ConfigError, match="line 1 has no answr; .* data.answer_key"):
        check_files(typo)


def test_held_out_prompts_that_a_run_trains_on_are_said_at_start_and_by_a_dry_run(recipe, capsys):
    same = "held-out prompts that are in data.path=train.jsonl, too: 1 of 1; a run trains on them"
    config = load(recipe)
    assert any(remark.startswith(same) for remark in describe_data(config))
    # It stands before what ends this run.
    assert main(["train", str(recipe), "warmstart.steps=0"]) == 2
    assert capsys.readouterr().out.splitlines() == doubts(config, check_files(config))
    Path("eval.jsonl").write_text(json.dumps({**GOOD, "prompt": "2 + 2 ="}) + "\n")
    assert doubts(config, check_files(config)) == []


def test_a_run_folder_that_cannot_be_made_is_refused_before_a_model_is_made(recipe, capsys):
    assert main(["train", str(recipe), "train.run_dir=/proc/run", "reward.kind=exact"]) == 2
    said = "/proc/run cannot be written (No such file or directory): set train.run_dir to another"
    assert capsys.readouterr().err == f"qurl: {said} folder\n" and not Path("model").exists()


def test_a_missing_wandb_is_said_before_a_model_is_made(recipe, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["train", str(recipe), "observe.wandb_project=rl", "reward.kind=exact"]) == 2
    assert "qurl: observe.wandb_project needs" in capsys.readouterr().err
    assert not Path("model").exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.max_new_tokens=1024", "leaves no room for a prompt: the model takes 1024 tokens"),
        ("parallel.pipeline=3", "parallel.pipeline=3 does not divide the model's num_hid"),
    ],
    ids=["response", "layers"],
)
def test_what_the_model_to_be_made_could_not_do_is_refused_before_it_is_made(
    override, said, recipe, capsys
):
    assert main(["train", str(recipe), "train.run_dir=run", "reward.kind=exact", override]) == 2
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1
    assert "warm start:" not in out and not Path("model").exists()


def test_chats_are_refused_before_a_model_without_a_template_is_made(recipe, capsys):
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2 ="}]
    with Path("train.jsonl").open("a") as file:
        file.write(json.dumps({**GOOD, "prompt": turns}) + "\n")
    said = (
        r"^data.path=train.jsonl line 3: a chat needs a chat template, which the small model .* "
        r"does not have; set model.path to an instruction-tuned model, or ask plain text"
    )
    for refuses in (check_files, describe_data):
        with pytest.raises(ConfigError, match=said):
            refuses(load(recipe))
        with pytest.raises(ConfigError, match="^data.chat=true: a chat needs a chat template"):
            refuses(load(recipe, ["data.chat=true"]))
    assert main(["train", str(recipe)]) == 2 and not Path("model").exists()
    check_files(load(recipe, ["warmstart.steps=0"]))


def test_a_simulated_scheme_is_said_to_be_one_at_start(recipe, capsys):
    given = ["warmstart.steps=0", "quant.scheme=int4"]
    assert main(["train", str(recipe), *given]) == 2  # for the model alone
    said = simulation("int4")
    assert said in capsys.readouterr().out.splitlines()
    assert "simulated: codes from -7 to 7 are kept" in said and not simulation("int8")


def test_a_dry_run_encodes_prompts_where_there_is_a_tokenizer(recipe):
    assert describe_data(load(recipe))[-1].startswith("how long prompts are is not checked")
    Path("model").mkdir()
    build_tokenizer([Question("1 + 1 =", "2")]).save_pretrained("model")
    shape = QWEN2 | {"vocab_size": 100, "max_position_embeddings": 16}
    Path("model/config.json").write_text(json.dumps(shape))
    with Path("train.jsonl").open("a") as file:
        file.write(json.dumps({**GOOD, "prompt": "1 + 1 + 1 + 1 + 1 + 1 + 1 ="}) + "\n")
    with pytest.raises(ConfigError, match="the model has room for 12 beside a response"):
        describe_data(load(recipe))
    said = describe_data(load(recipe, ["data.max_prompt_tokens=12"]))
    assert any("1 of 3 training prompts are longer than data.max_prompt" in one for one in said)
    assert any("kept as metadata: level" in one for one in said)


ARCH = read_arch({**QWEN2, "max_position_embeddings": 1024})


def test_experts_are_not_aligned_in_full(recipe):
    experts = replace(ARCH, experts=Experts(count=4, top_k=2, intermediate=8, norm_topk_prob=True))
    check_computed(load(recipe, ["train.align=weights"]), experts)
    with pytest.raises(ConfigError, match="train.align=full cannot compute experts"):
        check_computed(load(recipe, ["train.align=full"]), experts)


def test_a_response_that_fills_the_context_is_refused():
    message = r"rollout.max_new_tokens=100000 leaves no room .* takes 1024 tokens.*below 1024"
    with pytest.raises(ConfigError, match=message):
        longest_prompt(RolloutConfig(max_new_tokens=100_000), ARCH)
    with pytest.raises(ConfigError):
        longest_prompt(RolloutConfig(max_new_tokens=1024), ARCH)
    assert longest_prompt(RolloutConfig(max_new_tokens=1023), ARCH) == 1
    assert longest_prompt(RolloutConfig(max_new_tokens=1000), ARCH) == 24


@pytest.mark.parametrize(
    "engines",
    [
        dict(urls=("http://a:1",)),
        dict(rendezvous="engines.jsonl"),
        dict(backend="sglang", engine_args=("--context-length=200000",)),
    ],
)
def test_engines_that_may_take_more_are_left_to_say_so(engines):
    rollout = RolloutConfig(max_new_tokens=100_000, **engines)
    assert longest_prompt(rollout, ARCH) is None
